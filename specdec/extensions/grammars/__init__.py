"""Grammars of requests, exact at every position of a verification. What varies: what says which token may come."""
