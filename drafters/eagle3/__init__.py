"""EAGLE-3 heads. What varies: norms, biases, vocabulary and aux hidden states, all resolved from the checkpoint."""
