"""Tool calls and reasoning in answers: how families of models write them, read whole or as they come."""
