"""Extras: features with arrays that only some engines' rounds have, see `specdec.rounds.extras`."""
