"""Low precision: Float8 and MX products, dense and grouped."""
