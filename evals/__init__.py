"""Evaluation: run the library as a user would. The top floor; nothing imports it."""
