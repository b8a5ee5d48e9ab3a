"""The draft loop of heads that draft a whole block in one pass: host arrays, passes, and chains over the slots."""
