"""Hugging Face folders: weights, tokenizer, export, and the check of an export."""
