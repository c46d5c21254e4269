"""What the tokens of a document are: tokenizers and chat templates."""
