"""What works beside a run: the planner, rehearsals, reports, and starting runs. Nothing of the core
imports it.
"""
