"""Training for a loaded target: the plan, the target's answers, and the folder of a run."""
