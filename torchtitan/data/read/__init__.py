"""Documents: files and streams, their records, and the index."""
