"""Attention backends behind one interface. What varies: the library, its plans, and what a CUDA graph can hold."""
