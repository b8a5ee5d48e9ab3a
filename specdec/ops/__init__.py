"""Operators of compiled models and their Triton kernels, for different numbers of tokens, dtypes and summation
orders."""
