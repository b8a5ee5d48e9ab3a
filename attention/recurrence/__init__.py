"""Recurrent layers: states by slot, and what is folded into them. What varies: the recurrence, and what computes it."""
