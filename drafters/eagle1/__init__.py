"""EAGLE-1 and EAGLE-2 heads: `fc` over [embedding, hidden], plain layers, the target's lm_head."""
