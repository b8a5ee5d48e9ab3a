"""Training a head of either family on a target's answers, without the engine. What varies: head and objective."""
