"""The `specdec` command. Nothing heavy is imported until a command is run.

A command is named by "module:attribute" together with its one-line help, so that `specdec --help` prints
without importing torch. Every error of the `SpecdecError` tree becomes one message and exit code 2, here and only here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from specdec.errors import SpecdecError


class BadInput(click.ClickException):
    """An error of the `SpecdecError` tree, shown by click as one message."""

    exit_code = 2


@dataclass(frozen=True)
class LazyCommand:
    """Where a command lives ("module:attribute") and the line that the group's help shows for it."""

    target: str
    short_help: str

    def load(self) -> click.Command:
        """Import the module and return the command."""
        module, _, attribute = self.target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


class LazyGroup(click.Group):
    """A click group whose commands are imported when they are run, not when they are listed."""

    def __init__(self, *args: Any, lazy: Mapping[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = dict(lazy)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self._lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._lazy:
            return self._lazy[cmd_name].load()
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.short_help) for name, command in self._lazy.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Raises:
            BadInput: instead of an error of the `SpecdecError` tree.
        """
        try:
            return super().invoke(ctx)
        except SpecdecError as error:
            raise BadInput(str(error)) from error


_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}

_EVALUATIONS = {
    "acceptance": LazyCommand(
        "evals.cli.commands:acceptance", "Acceptance length, rates and speed-up of a draft head."
    ),
    "lossless": LazyCommand(
        "evals.cli.commands:lossless", "Check that speculation leaves the target's output unchanged."
    ),
    "compare": LazyCommand("evals.cli.commands:compare", "Two heads, two K or two backends, paired by prompt."),
    "gsm8k": LazyCommand("evals.cli.accuracy:gsm8k", "GSM8K accuracy with and without speculation (lm-eval)."),
    "humaneval": LazyCommand("evals.cli.accuracy:humaneval", "HumanEval pass@1; runs code the model wrote."),
    "lm-eval": LazyCommand("evals.cli.accuracy:lm_eval", "lm-eval's own command line with the specdec model."),
}

evaluate = LazyGroup("eval", lazy=_EVALUATIONS, context_settings=_CONTEXT, help="Measure a head, and check it.")

_COMMANDS = {
    "generate": LazyCommand("specdec.cli.generate:generate", "Generate text, with or without speculation."),
    "inspect": LazyCommand("specdec.cli.generate:inspect", "Show what a target and a head are, and whether they fit."),
    "train": LazyCommand("specdec.cli.train:train", "Train a draft head for a target."),
    "eval": LazyCommand("specdec.cli.main:evaluate", "Measure acceptance, speed-up and accuracy; check losslessness."),
}

cli = LazyGroup(
    "specdec",
    lazy=_COMMANDS,
    context_settings=_CONTEXT,
    help="Speculative decoding for Hugging Face causal language models, with exactly the model's own output.",
)
cli = click.version_option(package_name="specdec-hf", prog_name="specdec")(cli)


def main() -> None:
    """Entry point of the `specdec` command."""
    cli()


if __name__ == "__main__":
    main()
