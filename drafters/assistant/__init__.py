"""Small causal language models that draft for a larger one with the same vocabulary."""
