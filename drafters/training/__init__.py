"""Training draft heads. Needs no engine: generation, features and evaluation come in as callables."""
