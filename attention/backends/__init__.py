"""Attention backends behind one interface. They differ in library, plans, and what a CUDA graph can hold."""
