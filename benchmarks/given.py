"""A benchmark's command line: its help, lists of values, result files, and processes that take turns.

A run takes minutes of a GPU, so all of it is refused before anything is built.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click


def usage(page: str | None) -> str:
    r"""A module's docstring as a command's help, in which indented paragraphs (commands) keep their lines.

    >>> usage("Does this.\n\n    python -m this\n    python -m that\n")
    'Does this.\n\n\x08\n    python -m this\n    python -m that'
    """
    paragraphs = (page or "").strip().split("\n\n")
    return "\n\n".join(f"\b\n{each}" if each.startswith("    ") else each for each in paragraphs)


class Listed(click.ParamType):
    """Values of another type with commas between; "" is none of them.

    >>> Listed(click.IntRange(0)).convert("0,1,3", None, None), Listed(click.FloatRange(0, 1)).convert("", None, None)
    ([0, 1, 3], [])
    """

    name = "list"

    def __init__(self, each: click.ParamType) -> None:
        self._each = each

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[Any]:
        """See click. Raises click.BadParameter."""
        if isinstance(value, list):  # a default that click converts again
            return value
        return [self._each.convert(each.strip(), param, ctx) for each in value.split(",") if each.strip()]


class ResultFile(click.Path):
    """A file to which lines are appended in the end: its folder must be there."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See click. Raises click.BadParameter."""
        path: Path = super().convert(value, param, ctx)  # type: ignore[assignment]
        if not path.parent.is_dir():
            self.fail(f"there is no folder {path.parent}", param, ctx)
        return path


def check_range(name: str, bounds: tuple[int, int], least: int = 1) -> None:
    """Raises click.UsageError unless an option's two numbers are in order, and none is less than `least`."""
    if not least <= bounds[0] <= bounds[1]:
        raise click.UsageError(f"{name} {bounds[0]} {bounds[1]}: the smaller one first, and none less than {least}")


def wait_for(file: Path) -> None:
    """Say by FILE.ready that everything is built, and wait until FILE exists: several processes can build their graphs
    at once and measure one after the other."""
    file.with_name(f"{file.name}.ready").touch()
    while not file.exists():
        time.sleep(0.1)
