"""Tests of a model while it is loaded: rounds must give the model's own results."""
