"""The `specdec` command. What varies: options and how results are shown; nothing is computed here."""
