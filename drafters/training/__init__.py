"""Training a head of either family on a target's answers, without the engine. Families differ in head and objective."""
