"""A transformers model's own `generate` and continuous batching, run by this library: see `specdec.attach`."""
