"""What a tokenizer makes of data: bytes per token, lengths of documents, use of the vocabulary."""
