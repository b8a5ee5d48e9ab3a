"""One batch as numpy arrays and as device views, of ragged or fixed shape; independent of attention backends."""
