"""The user's model: its kind, the parts that rounds read, and detection of changes."""
