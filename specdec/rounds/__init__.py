"""All arrays of a round, as numpy. What varies: ragged or fixed shape, and what is known when they are made."""
