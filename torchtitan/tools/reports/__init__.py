"""Reads run folders, and reports the progress of each run and differences between runs."""
