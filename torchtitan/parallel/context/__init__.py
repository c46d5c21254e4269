"""Context parallelism: attention over parts of a row."""
