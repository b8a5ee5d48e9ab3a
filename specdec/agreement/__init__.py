"""Whether a head and a target agree, and if not, whether another reading of the head's files does. What varies: how."""
