"""What a document is: files and streams, their records, and the index."""
