"""Savings of memory: recomputed and offloaded activations."""
