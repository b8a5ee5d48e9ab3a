"""The border to transformers. What varies: how a model's attention modules are called, and in which form (MLA)."""
