"""One batch as numpy arrays and as device views. What varies: ragged or fixed shape, never how attention works."""
