"""Several multi-token-prediction modules that draft in turn, each over a cache layer of its own."""
