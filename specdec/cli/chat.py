"""The command `specdec chat`."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.options import SAMPLING_OPTIONS, added, examples, load_for_sampling, model_options, option
from specdec.errors import InvalidInputError, SpecdecError
from specdec.values import Options

if TYPE_CHECKING:
    from specdec.model import SpeculativeModel
    from specdec.requests.request import Completion
    from specdec.requests.sampling import SamplingParams

_HELP = (
    "/stats: acceptance and times so far; /reset: forget what was said; /quit (or Ctrl-D): end; Ctrl-C: end an answer"
)


@click.command(
    epilog=examples(
        "specdec chat",
        "specdec chat --model gsm-deepseek --draft mtp -k 3",
        'specdec chat --system "Answer in one sentence." --temperature 0.7 --top-p 0.9 --max-new-tokens 500',
    )
)
@option("--system", "The system message, before all others.")
@option("--chat-template", "A file with the chat template, in place of the tokenizer's.", type=click.File())
@option("--chat-template-kwargs", "Variables of the chat template, a JSON object.", metavar="JSON")
@added(SAMPLING_OPTIONS)
@model_options(["seed"])
def chat(system: str | None, chat_template: Any, chat_template_kwargs: str | None, **options: Any) -> None:
    """Talk with a model. It sees the whole conversation; /help lists what can be typed beside messages."""
    template = {} if chat_template is None else {"chat_template": chat_template.read()}
    if chat_template_kwargs is not None:
        try:
            template["chat_template_kwargs"] = {**json.loads(chat_template_kwargs)}
        except (TypeError, ValueError) as error:
            hint = "--chat-template-kwargs"
            raise click.BadParameter(f"{chat_template_kwargs!r} is no JSON object: {error}", param_hint=hint) from None
    model, params = load_for_sampling(options)
    if not getattr(model.tokenizer, "chat_template", None) and "chat_template" not in template:
        raise InvalidInputError(
            f"the tokenizer of {options['model']} has no chat template; use `specdec generate`, which takes plain text"
        )
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (lines can be edited, and earlier ones come back with the arrow keys)
    conversation = Conversation(model, params, system, template)
    click.echo(f"{model!r}\n{_HELP}", err=True)
    while (line := next_line()) is not None and conversation.take(line):
        pass


def next_line() -> str | None:
    """What the user types, without space around it; None at the end of the input. Ctrl-C gives the line up."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        click.echo(f"\n{_HELP}", err=True)
        return ""


class Conversation:
    """The messages of a conversation.

    Attributes:
        messages: of the chat template. done: finished answers, those before the last /reset too.
    """

    def __init__(
        self,
        model: SpeculativeModel,
        params: SamplingParams,
        system: str | None = None,
        template: Options | None = None,
    ) -> None:
        """params: of every answer. system: the first message, which /reset keeps. template: options of `stream`."""
        self._model = model
        self._params = params
        self._template = dict(template or {})
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._first)
        self.done: list[Completion] = []

    def take(self, line: str) -> bool:
        """Run a line: a command, or a message to the model. Returns whether the conversation goes on."""
        if line in ("/quit", "/exit"):
            return False
        if line == "/reset":
            self.messages = list(self._first)
            click.echo("what was said is forgotten", err=True)
        elif line == "/stats":
            self._print_stats()
        elif line.startswith("/"):
            click.echo(_HELP, err=True)
        elif line:
            self._answer(line)
        return True

    def _answer(self, text: str) -> None:
        """Show the answer as it comes. Ctrl-C ends it, and what was shown is kept as the model's answer."""
        asked = [*self.messages, {"role": "user", "content": text}]
        shown = ""
        try:
            with self._model.stream(asked, self._params, **self._template) as stream:
                for update in stream:
                    shown += update.text
                    click.echo(update.text, nl=False)
                    if update.completion is not None:
                        self.done.append(update.completion)
        except KeyboardInterrupt:
            click.secho(" [ended]", dim=True, nl=False, err=True)
        except SpecdecError as error:  # too long a conversation, most likely; the message is dropped
            click.echo(f"Error: {error}\n/reset begins a new conversation", err=True)
            return
        click.echo()
        self.messages = [*asked, {"role": "assistant", "content": shown}]

    def _print_stats(self) -> None:
        from rich.console import Console

        from specdec.cli.tables import stats_table

        if not self.done:
            click.echo("no answer has ended yet", err=True)
            return
        Console(stderr=True).print(stats_table(self.done))
