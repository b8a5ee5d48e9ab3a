"""`python -m specdec`: the `specdec` command."""

from __future__ import annotations

from specdec.cli.main import main

main()
