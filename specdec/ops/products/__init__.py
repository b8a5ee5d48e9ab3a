"""Operators of compiled models and their Triton kernels. What varies: number of tokens, dtype, order of summation."""
