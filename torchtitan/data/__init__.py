"""Turns text or token files into this rank's rows of every step, in one global order."""
