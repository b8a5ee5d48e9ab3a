"""A chain of drafts from several multi-token-prediction modules in turn, each with a cache layer of its own."""
