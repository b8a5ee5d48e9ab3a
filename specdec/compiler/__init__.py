"""torch.compile of target and head. What varies: the patterns that are rewritten, and the compiler's settings."""
