"""EAGLE-3 heads. Their norms, biases, vocabulary and aux hidden states are resolved from the checkpoint."""
