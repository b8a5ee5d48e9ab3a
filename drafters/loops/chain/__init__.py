"""The chain: a head that is fed its own output, one token per row and step."""
