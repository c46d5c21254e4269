"""Proof: a distributed run against one process, and the matrix of what works together."""
