"""eagle3."""
