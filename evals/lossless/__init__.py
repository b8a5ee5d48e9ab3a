"""Whether speculation changes the output. What varies: greedy tokens, or the distribution of sampled ones."""
