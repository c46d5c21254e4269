"""One rank of a run: check, build, step, loop."""
