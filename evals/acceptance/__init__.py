"""Acceptance and speed-up of a head against the target alone. What varies: configurations and metrics."""
