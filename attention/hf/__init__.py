"""The border to transformers. Models differ in how their attention modules are called, and in which form (MLA)."""
