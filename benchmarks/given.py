"""What is given on a benchmark's command line: lists of numbers, result files, and options that would do nothing.

A run takes minutes of a GPU, so all of it is refused before anything is built.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource


def numbers(listed: str) -> list[int]:
    """The numbers of an option's list.

    >>> numbers("1,32"), numbers("")
    ([1, 32], [])
    """
    return [int(number) for number in listed.split(",") if number]


class Numbers(click.ParamType):
    """Whole numbers with commas between, from `least` on; "" is none of them.

    >>> Numbers(0).convert("0,1,3", None, None), Numbers(1).convert("", None, None)
    ([0, 1, 3], [])
    """

    name = "numbers"

    def __init__(self, least: int) -> None:
        self._least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """See click. Raises click.BadParameter."""
        if isinstance(value, list):  # a default that click converts again
            return value
        try:
            found = numbers(value)
        except ValueError:
            found = [self._least - 1]
        if min(found, default=self._least) < self._least:
            self.fail(f"{value!r} is no list of whole numbers from {self._least} on with commas between", param, ctx)
        return found


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


def refuse_unused(context: click.Context, names: Iterable[str], reason: str) -> None:
    """Refuse options that do nothing in this run.

    Args:
        names: of the parameters; one that has its default value unasked is no mistake. reason: for the message.

    Raises:
        click.UsageError: one of them was given.
    """
    spelled = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    given = [spelled[name] for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if given:
        raise click.UsageError(f"{', '.join(given)} would do nothing: {reason}")
