"""What the GPUs and links of this node reach, beside what the planner expects of them."""
