"""Questions and prompts. What varies: the data set and its format."""
