"""Hugging Face's format: `config.json`, names of weights, and quantized weights."""
