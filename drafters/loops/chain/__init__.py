"""A chain of drafts from one head: a draft prefill, then one token per step."""
