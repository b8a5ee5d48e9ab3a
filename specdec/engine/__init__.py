"""Continuous batching: scheduling, launching and committing rounds, and sharing an engine among threads."""
