"""evals: runs the library the way a user would, and measures it. The top floor; nothing imports it."""
