"""Expert parallelism: sharded experts, and the exchange of rows between their ranks."""
