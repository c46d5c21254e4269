"""The planner: memory, speed and the best layout of a run, predicted without a GPU."""
