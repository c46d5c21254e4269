"""Gated DeltaNet: the layer and its delta rule."""
