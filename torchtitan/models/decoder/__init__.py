"""The decoder: its hyper-parameters, its blocks, and what it declares about itself."""
