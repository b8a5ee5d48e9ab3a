"""Offline batches: a file of rows, or columns of a data set, answered in bounded memory, each row once."""
