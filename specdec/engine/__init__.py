"""Continuous batching: who runs, what a verification result means for rows and requests, and who may call."""
