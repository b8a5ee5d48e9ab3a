"""Ranks: the processes that a tensor-parallel target is divided among, what they send each other, and their shares."""
