"""What only some engines' rounds have: see `specdec.rounds.extras`."""
