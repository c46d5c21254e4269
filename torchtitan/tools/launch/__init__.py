"""Starting runs: a project from a few answers, many runs at once, and the jobs of the scheduler."""
