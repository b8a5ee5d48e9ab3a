"""A run: questions, workers and the folder that keeps answers. What varies: this process or Ray."""
