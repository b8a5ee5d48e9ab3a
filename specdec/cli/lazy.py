"""LazyGroup: a group of commands that are imported when they are run, not when they are listed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from specdec.errors import SpecdecError

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
"""Click's settings of every group."""


class BadInput(click.ClickException):
    """An error of the `SpecdecError` tree, shown by click as one message."""

    exit_code = 2


class Interrupted(click.ClickException):
    """Ctrl-C, shown by click as one message; the exit code is the shell's for it."""

    exit_code = 130


@dataclass(frozen=True)
class LazyCommand:
    """Where a command lives ("module:attribute") and the line that the group's help shows for it."""

    target: str
    short_help: str

    def load(self) -> click.Command:
        """Import the module and return the command.

        Raises:
            BadInput: a package that it needs is not installed.
        """
        module, _, attribute = self.target.partition(":")
        try:
            command: click.Command = getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise BadInput(f"{module} needs the module {error.name!r}, which is not installed") from error
        return command


class LazyGroup(click.Group):
    """A click group of lazy commands, in the order given. Errors of the `SpecdecError` tree end with one message.

    Attributes:
        lazy: the commands by name.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = dict(lazy)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.lazy:
            return self.lazy[cmd_name].load()
        return super().get_command(ctx, cmd_name)

    def help_lines(self, ctx: click.Context) -> list[tuple[str, str]]:
        """(name, one line) of every command, without importing the lazy ones."""
        return [(name, command.short_help) for name, command in self.lazy.items()]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(self.help_lines(ctx))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Raises:
            BadInput: instead of an error of the `SpecdecError` tree. Interrupted: instead of KeyboardInterrupt.
        """
        try:
            return super().invoke(ctx)
        except SpecdecError as error:
            raise BadInput(" ".join(str(error).split())) from error
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted; a run keeps what it has answered, and the same command goes on") from error
