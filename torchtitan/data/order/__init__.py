"""The order of rows: shuffles, lanes, and mixtures."""
