"""Requests that move between engines: one model reads a prompt, another generates. Optional."""
