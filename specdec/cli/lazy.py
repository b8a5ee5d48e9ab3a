"""Command groups whose commands are imported when they run, with the commands that other packages add.

An entry point names a click command: `eval = "package.module:command"`. Its module is imported for `specdec --help`,
which shows its one-line help: it must be quick to import, and import what the command needs when that runs.

In a checkout, the entry points of this distribution are read from its pyproject.toml: the metadata of an editable
install are those of the day it was installed. Elsewhere, and those of other distributions, from the installed metadata.
Source: packaging.python.org, "Entry points specification".
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Any

import click

from specdec.errors import SpecdecError
from specdec.import_names import ROOT, check_sibling
from specdec.values import Json

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}
"""Click's settings of every group."""


class BadInput(click.ClickException):
    """An error of the `SpecdecError` tree, shown by click as it was written and where the manual describes it."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        super().show(file)
        if isinstance(self.__cause__, SpecdecError):
            click.echo(f"See {self.__cause__.described_at()}", file=file or sys.stderr)


class Interrupted(click.ClickException):
    """Ctrl-C, shown by click as one message; the exit code is the shell's for it."""

    exit_code = 130


@dataclass(frozen=True)
class LazyCommand:
    """Where a command lives ("module:attribute") and the line that the group's help shows for it."""

    target: str
    short_help: str

    def load(self) -> click.Command:
        """Import the module and return the command. Raises BadInput: a package that it needs is not installed."""
        try:
            command: click.Command = resolve_name(self.target)
        except ModuleNotFoundError as error:
            module = self.target.partition(":")[0]
            raise BadInput(f"{module} needs the module {error.name!r}, which is not installed") from error
        return command


class LazyGroup(click.Group):
    """A click group of lazy commands (`lazy`, by name), in the order given. `SpecdecError`s end with one message."""

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], adds: bool = False, **kwargs: Any) -> None:
        """adds: with the commands that other packages add."""
        super().__init__(*args, **kwargs)
        self.lazy = lazy
        self._adds = adds

    @cached_property
    def plugins(self) -> Mapping[str, Plugin]:
        """Commands that other packages add, by name. Looked for once, when commands are listed or one is not built in.

        Raises:
            BadInput: two commands have one name.
        """
        try:
            return find_plugins(self.lazy) if self._adds else {}
        except PluginError as error:
            raise BadInput(str(error)) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self.lazy, *self.plugins]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = self.lazy.get(cmd_name) or self.plugins.get(cmd_name)
        return None if found is None else found.load()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that `args` name; an unknown name is answered with the nearest one, or all."""
        name = args[0]
        if name not in self.lazy and not name.startswith("-") and self.get_command(ctx, name) is None:
            names = self.list_commands(ctx)
            close = get_close_matches(name, names, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Commands are {', '.join(names)}."
            ctx.fail(f"No such command {name!r}. {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands, without importing the lazy ones."""
        shown: dict[str, LazyCommand | Plugin] = {**self.lazy, **self.plugins}
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.short_help) for name, each in shown.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Raises:
            BadInput: instead of an error of the `SpecdecError` tree. Interrupted: instead of KeyboardInterrupt.
        """
        try:
            return super().invoke(ctx)
        except SpecdecError as error:
            raise BadInput(str(error)) from error
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted; a run keeps what it has answered, and the same command goes on") from error


GROUP = "specdec.commands"
DISTRIBUTION = "specdec-hf"


class PluginError(SpecdecError):
    """A command that another package adds cannot be loaded."""


@dataclass(frozen=True)
class Plugin:
    """A command that a package adds.

    Attributes:
        entry: "module:command" under the command's name.
        distribution: that it comes from.
    """

    entry: EntryPoint
    distribution: str

    def load(self) -> click.Command:
        """Import the command.

        Raises:
            PluginError: another distribution owns the name of its package, or something that it imports is missing.
        """
        name = self.entry.name
        try:
            if self.distribution == DISTRIBUTION:
                check_sibling(self.entry.module.partition(".")[0])
            command = self.entry.load()
        except (ImportError, AttributeError) as error:
            raise PluginError(f"`specdec {name}` ({self.distribution}) cannot be loaded: {error}") from error
        if not isinstance(command, click.Command):
            raise PluginError(f"`specdec {name}`: {self.entry.value} of {self.distribution} is no click command")
        return command

    @property
    def short_help(self) -> str:
        """The line that the group's help shows for it; the reason where it cannot be loaded."""
        try:
            return self.load().get_short_help_str(limit=100)
        except PluginError as error:
            return str(error)


def checkout(root: Path) -> Json:
    """The [project] table of the pyproject.toml at `root`; {} where it is another project's, or there is none."""
    file = root / "pyproject.toml"
    project: Json = tomllib.loads(file.read_text("utf-8")).get("project", {}) if file.is_file() else {}
    return project if project.get("name") == DISTRIBUTION else {}


def find_plugins(taken: Iterable[str], root: Path = ROOT) -> Mapping[str, Plugin]:
    """The commands that packages add, by name; those of this distribution, whose packages lie at `root`, first.

    Raises:
        PluginError: two commands have one name, which may be that of a built-in one (`taken`).
    """
    installed = [
        Plugin(entry, str(entry.dist.name) if entry.dist else "an unknown distribution")
        for entry in entry_points(group=GROUP)
    ]
    own = [plugin for plugin in installed if plugin.distribution == DISTRIBUTION]
    if project := checkout(root):
        table = project.get("entry-points", {}).get(GROUP, {})
        own = [Plugin(EntryPoint(name, value, GROUP), DISTRIBUTION) for name, value in table.items()]
    others = [plugin for plugin in installed if plugin.distribution != DISTRIBUTION]
    found = {}
    owners = dict.fromkeys(taken, "specdec itself")
    # once: an editable install is found twice where its folder is on the path, there and in site-packages
    for plugin in dict.fromkeys((*own, *others)):
        name = plugin.entry.name
        if name in owners:
            raise PluginError(
                f"{plugin.distribution} adds the command {name!r}, which {owners[name]} has; uninstall one"
            )
        found[name] = plugin
        owners[name] = plugin.distribution
    return found
