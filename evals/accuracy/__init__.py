"""Accuracy with and without speculation through lm-eval. What varies: the task."""
