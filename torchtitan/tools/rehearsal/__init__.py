"""Runs the ranks of a whole cluster one by one without their network, and checks that together they
can't hang.
"""
