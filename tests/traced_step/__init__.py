"""One training step of one rank, traced without a GPU: the reference of the planner's formulas."""
