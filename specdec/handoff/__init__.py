"""Requests that change engines: one model reads a prompt, another generates. Optional: nothing else needs it."""
