"""Draft loops: the rows that a head reads after a verification, and the steps that follow."""
