"""Write docs/reference/command_line.md from the commands themselves: python docs/scripts/command_line.py [--check]."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from specdec.cli.main import cli

PAGE = Path(__file__).resolve().parents[1] / "reference" / "command_line.md"
_HEADER = """# Command line

After this page you know every command of `specdec`, and each of its options.
The page is written from the commands by `docs/scripts/command_line.py`.

```bash
specdec --help
```

`--version` prints the version.

Exit codes: 0 done, 1 a check or a row failed, 2 bad input, 3 nothing was tested.
"""


def commands(command: click.Command = cli, path: str = "specdec") -> Iterator[tuple[str, click.Command]]:
    """Every command with its name, groups before what they hold."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            if (found := command.get_command(context, name)) is not None:
                yield from commands(found, f"{path} {name}")


def page() -> str:
    """The text of the page."""
    return "\n".join([_HEADER, *(_section(*each) for each in commands() if each[0] != "specdec")])


def _section(path: str, command: click.Command) -> str:
    said = " ".join((command.help or command.short_help or "").replace("\b", "").split())
    options = [one for one in command.params if isinstance(one, click.Option) and not one.hidden]
    arguments = [one.make_metavar(click.Context(command)) for one in command.params if isinstance(one, click.Argument)]
    usage = " ".join([path, *arguments, *(["[options]"] if options else [])])
    parts = [f"## {path}\n", f"{_plain(said)}\n", f"`{usage}`\n"]
    if options:
        own = command.context_settings.get("default_map", {})
        rows = [f"| {', '.join(f'`{name}`' for name in names(one))} | {_told(one, own)} |" for one in options]
        parts += ["| option | |", "|---|---|", *rows, ""]
    return "\n".join(parts)


def names(option: click.Option) -> list[str]:
    """As they are typed."""
    return [*option.opts, *option.secondary_opts]


def _told(option: click.Option, own: Mapping[str, object]) -> str:
    default = own.get(option.name or "", option.default)
    shown = option.show_default and isinstance(default, str | int | float) and not isinstance(default, bool)
    return _plain((option.help or "").strip()) + (f" Default: `{default}`." if shown else "")


def _plain(text: str) -> str:
    """With nothing that Markdown would read as a tag or as a cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[").replace("*", "\\*")


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page(), "utf-8")
    elif PAGE.read_text("utf-8") != page():
        sys.exit("docs/reference/command_line.md is out of date; run: python docs/scripts/command_line.py")
