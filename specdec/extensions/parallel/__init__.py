"""Ranks: the processes that a tensor-parallel target is divided among, their messages, exchanges and shares."""
