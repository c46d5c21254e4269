"""Optimizer, learning rate and loss."""
