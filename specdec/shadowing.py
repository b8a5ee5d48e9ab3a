"""The packages that are installed beside `specdec` have common names: another distribution may own one of them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The folder that the packages lie in: of a checkout, or site-packages."""


def check_sibling(name: str) -> None:
    """Make sure that `import name` finds the package beside this one.

    Raises:
        ImportError: it finds another or none; the message names the file.
    """
    spec = find_spec(name)
    origin = None if spec is None else spec.origin or next(iter(spec.submodule_search_locations or ()), None)
    found = None if origin is None else Path(origin).resolve()
    if found is None or found != ROOT / name / "__init__.py":
        raise ImportError(
            f"specdec needs its own package {name!r} at {ROOT / name}, but `import {name}` finds "
            f"{found or 'nothing'}; remove or rename what shadows it"
        )
