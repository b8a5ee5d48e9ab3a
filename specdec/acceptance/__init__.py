"""What of the drafts is accepted. What varies: greedy or sampled rows, and the target's filtered distribution."""
