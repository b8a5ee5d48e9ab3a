"""Files and configurations of heads. What varies: the layout and the names that a family of checkpoints uses."""
