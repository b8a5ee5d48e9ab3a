"""Training of draft heads. Needs no engine: `regenerate` and `evaluate` are given as callables."""
