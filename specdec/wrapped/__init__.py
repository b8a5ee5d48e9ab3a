"""The model of the user: what it is, what of it rounds read, and whether it is still what it was."""
