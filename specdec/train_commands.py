"""The command group `specdec train`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from specdec.errors import InvalidInputError
from specdec.options import MTP_OPTIONS, examples

if TYPE_CHECKING:
    from drafters.mtp_spec import Concat, Feedback
    from drafters.training.trainer import TrainResult


_MODEL_HELP = "Target: built-in name, folder or hub name."
_DATA = (
    click.option(
        "--data",
        multiple=True,
        required=True,
        type=click.Path(path_type=Path),
        help="JSONL of questions (messages, prompt or question a line); the target writes the answers. Repeatable.",
    ),
    click.option("--output", required=True, type=click.Path(path_type=Path), help="Folder; an unfinished run goes on."),
)
_RUN = (
    click.option("--decay", default=0.8, show_default=True, help="Loss weight of step i is decay^i."),
    click.option("--held-out", default=256, show_default=True, help="Questions that only measure."),
    click.option("--max-new-tokens", default=512, show_default=True, help="Of an answer."),
    click.option("--max-length", default=1024, show_default=True, help="Of a training sequence."),
    click.option("--max-num-seqs", default=64, show_default=True, help="Questions answered at once."),
    click.option("--answers-only", is_flag=True, help="Only let the target answer (several files in parallel, say)."),
    click.option("--compile", "compile_", is_flag=True, help="Run the loss through torch.compile."),
    click.option("--seed", default=0, show_default=True),
    click.option("--backend", type=click.Choice(["auto", "torch", "flashinfer"]), default="auto", show_default=True),
    click.option("--dtype", default="auto", show_default=True, help="Of the target."),
    click.option("--device", help="Default: CUDA where there is one."),
)
_Command = TypeVar("_Command", bound=Callable[..., Any])


def _with(options: Sequence[Callable[[Any], Any]]) -> Callable[[_Command], _Command]:
    """Add options to a command, in their order."""

    def added(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return added


@click.group(
    epilog=examples(
        "specdec train eagle3 --data questions.jsonl --output run",
        "specdec train mtp --data questions.jsonl --output run",
    )
)
def train() -> None:
    """Train a draft head for a target."""


@train.command(
    epilog=examples(
        "specdec train eagle3 --data questions.jsonl --output run --draft-vocab-size 1536",
        "specdec train eagle3 --data a.jsonl --data b.jsonl --output run --steps 500 --held-out 64",
    )
)
@click.option("--model", default="gsm-llama", show_default=True, help=_MODEL_HELP)
@_with(_DATA)
@click.option("--draft-vocab-size", type=click.IntRange(1), help="Default: the target's whole vocabulary.")
@click.option("--intermediate-size", type=click.IntRange(1), help="Of the head's MLP. Default: the target's.")
@click.option("--taps", help="Boundaries, e.g. 2,4,5. Default: 2, N//2, N-3.")
@click.option("--steps", default=1500, show_default=True)
@click.option("--batch-size", default=48, show_default=True)
@click.option("--ttt-steps", default=5, show_default=True, help="Steps of the training-time test.")
@click.option("--learning-rate", default=1e-3, show_default=True)
@_with(_RUN)
def eagle3(**options: Any) -> None:
    """Train an EAGLE-3 head; the result is OUTPUT/head, in the layout that other engines read too."""
    from specdec.training import HeadShape, train_eagle3

    shape = HeadShape(options["draft_vocab_size"], options["intermediate_size"], _taps(options["taps"]))
    _run(options, lambda model, answers, config, **rest: train_eagle3(model, answers, shape, config, **rest))


@train.command(epilog=examples("specdec train mtp --data questions.jsonl --output run --steps 200 --ttt-steps 3"))
@click.option("--model", default="gsm-deepseek", show_default=True, help=_MODEL_HELP)
@_with(_DATA)
@click.option("--module", help="Checkpoint that holds the module. Default: the target's own.")
@click.option("--steps", default=1000, show_default=True)
@click.option("--batch-size", default=48, show_default=True)
@click.option("--ttt-steps", default=4, show_default=True, help="Drafts in a row that the module is trained for.")
@click.option("--learning-rate", default=2e-4, show_default=True)
@_with(MTP_OPTIONS)
@_with(_RUN)
def mtp(module: str | None, mtp_concat: Concat, mtp_feedback: Feedback, **options: Any) -> None:
    """Go on training a multi-token-prediction module for several drafts in a row; the result is OUTPUT/head.

    Its checkpoint reads [embedding, hidden]; what is fed back it does not say: draft with the same --mtp-feedback.
    """
    from drafters.mtp_spec import MtpReading
    from specdec.training import train_mtp

    source, reading = module or options["model"], MtpReading(mtp_concat, mtp_feedback)
    _run(options, lambda model, answers, config, **rest: train_mtp(model, source, answers, reading, config, **rest))


def _run(options: dict[str, Any], train_head: Callable[..., TrainResult]) -> None:
    """Load the target, let it answer, train."""
    from rich.console import Console

    from drafters.training.answers import AnswerSet
    from drafters.training.config import TrainConfig
    from drafters.training.questions import read_questions
    from specdec.model import SpeculativeModel
    from specdec.training import AnswerLimits, answer_questions

    questions = [read_questions(path) for path in options["data"]]
    config = TrainConfig(
        compile=options["compile_"],
        **{name: options[name] for name in ("steps", "batch_size", "ttt_steps", "decay", "learning_rate", "seed")},
    )
    model = SpeculativeModel.from_pretrained(
        options["model"],
        backend=options["backend"],
        dtype=options["dtype"],
        device=options["device"],
        max_num_seqs=options["max_num_seqs"],
    )
    console, output = Console(), options["output"]
    limits = AnswerLimits(options["max_new_tokens"], options["max_length"])
    answers = [answer_questions(model, each, limits, output, console) for each in questions]
    if options["answers_only"]:
        return
    joined = AnswerSet.joined(answers)
    result = train_head(model, joined, config, output=output, held_out=options["held_out"], console=console)
    click.echo(f"the head is in {result.folder}")


def _taps(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidInputError(f"--taps {text!r}: give boundaries separated by commas, e.g. 2,4,5") from error
