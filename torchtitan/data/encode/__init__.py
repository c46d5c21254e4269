"""Tokens of a document: tokenizers and chat templates."""
