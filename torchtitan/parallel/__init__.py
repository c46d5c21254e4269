"""Distribute a model: mesh, process groups, and the ordered list of steps, `parallelize`."""
