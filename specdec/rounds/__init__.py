"""All arrays of a round, as numpy, of ragged or fixed shape, made before or after the verification is read."""
