"""Tables beside the code, in TOML."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any


def read_tables(package: str, path: str) -> dict[str, Any]:
    """A file of a package, by its path there."""
    return tomllib.loads(files(package).joinpath(path).read_text("utf-8"))
