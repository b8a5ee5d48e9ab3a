"""torch.compile of target and head: the patterns that are rewritten in graphs, and the compiler's settings."""
