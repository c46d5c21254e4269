"""Text: files and streams, their records, the index, and the tokenizer."""
