"""The `specdec` command. Nothing heavy is imported until a command is run.

A command is named by "module:attribute" together with its one-line help, so that `specdec --help` prints without
importing torch. Other packages add commands through entry points (specdec/cli/lazy.py). Every error of the
`SpecdecError` tree becomes one message and exit code 2, in LazyGroup and only there.
"""

from __future__ import annotations

import warnings
from typing import Any

import click

from specdec.cli.lazy import CONTEXT, LazyCommand, LazyGroup
from specdec.cli.options import examples

_COMMANDS = {
    "generate": LazyCommand("specdec.cli.generate:generate", "Generate text, with or without speculation."),
    "chat": LazyCommand("specdec.cli.chat:chat", "Talk with a model."),
    "batch": LazyCommand("specdec.cli.batch:batch", "Answer the rows of a file, however many; goes on when killed."),
    "serve": LazyCommand("specdec.cli.serve:serve", "Serve a model over HTTP, with OpenAI's interface."),
    "inspect": LazyCommand("specdec.cli.inspect:inspect", "Show what a target and a head are, and whether they fit."),
    "train": LazyCommand("specdec.cli.train:train", "Train a draft head for a target."),
    "export": LazyCommand("specdec.cli.export:export", "Write a head in the layout of vLLM or SGLang."),
    "doctor": LazyCommand("specdec.cli.doctor:doctor", "Show the environment, and what is missing here."),
}


def _help() -> None:
    """Without a command the help is the answer, and no usage error."""
    context = click.get_current_context()
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


cli = LazyGroup(
    "specdec",
    lazy=_COMMANDS,
    adds=True,
    callback=_help,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",
    context_settings=CONTEXT,
    help="Speculative decoding for Hugging Face causal language models, with exactly the model's own output.",
    epilog=examples(
        'specdec generate "Tom has 3 boxes of 12 eggs. How many eggs?" --stats',
        "specdec chat",
        'specdec generate --model Qwen/Qwen3-8B --draft lookup "Why is the sky blue?"',
        "specdec inspect --model gsm-deepseek --draft mtp",
        "specdec doctor",
    ),
)
cli = click.version_option(package_name="specdec-hf", prog_name="specdec")(cli)


def main() -> None:
    """Entry point of the `specdec` command. A warning is one line, without the place in the code it came from."""
    warnings.formatwarning = _one_line
    cli()


def _one_line(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> str:
    return f"Warning: {message}\n" if issubclass(category, UserWarning) else f"{category.__name__}: {message}\n"


if __name__ == "__main__":
    main()
