"""From names and options to objects that fit together. What varies: where a target comes from, and what can fail."""
