"""Triton kernels over pages, CUDA only. They differ in tile shapes and in what may change the order of summation."""
