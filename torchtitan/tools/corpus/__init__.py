"""Surveys of tokenized data: bytes per token, lengths of documents, use of the vocabulary."""
