"""Grammars of requests, exact at every position of a verification. What varies: the source of the token masks."""
