"""Several processes can build their graphs at once and measure one after the other."""

from __future__ import annotations

import time
from pathlib import Path


def wait_for(file: Path) -> None:
    """Say by FILE.ready that everything is built, and wait until FILE exists."""
    file.with_name(f"{file.name}.ready").touch()
    while not file.exists():
        time.sleep(0.1)
