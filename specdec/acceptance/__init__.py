"""Acceptance of drafts, for greedy and for sampled rows, under the target's filtered distribution."""
