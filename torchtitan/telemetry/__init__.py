"""Reports of a run: console, metrics, events, the run record, profiles."""
