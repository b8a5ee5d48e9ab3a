"""Draft loops: which rows a head reads after a verification, and which steps follow. Each kind of loop has its own
modules."""
