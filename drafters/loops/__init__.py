"""Draft loops: from a head and accepted tokens to drafts. What varies: how drafts depend on each other."""
