"""Draft heads: how to guess. Knows nothing of scheduling or acceptance."""
