"""The `specdec` command. What varies: options and how results are shown; nothing is computed here."""

from __future__ import annotations

import sys
from typing import NoReturn

from specdec.import_names import other_distribution


def refuse() -> NoReturn:
    """Refuse the command of another distribution named `specdec`, which calls `specdec.cli:main` and finds us here."""
    sys.exit(f"Error: {other_distribution() or 'run `python -m specdec`'}")


main = refuse  # importing specdec.cli.main, as our own command does, makes this name that module's
