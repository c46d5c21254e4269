"""Reports of a run: console, metrics, events, notifications, the run record, profiles."""
