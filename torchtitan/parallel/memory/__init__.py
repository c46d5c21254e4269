"""What saves memory: recomputed and offloaded activations."""
