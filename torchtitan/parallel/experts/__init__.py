"""Expert parallelism: experts over ranks, and the rows that travel to them."""
