"""Context parallelism: attention over rows that several ranks share."""
