"""Triton kernels over pages, CUDA only. What varies: tile shapes, and what may change the order of summation."""
