"""Whether a head belongs to its target, and if not, which other reading of its files would."""
