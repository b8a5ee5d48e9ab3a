"""The command group `specdec train`."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attention.backends.kinds import KINDS
from specdec.cli.options import (
    COUNT,
    FILE,
    Numbers,
    added,
    examples,
    flag,
    load_options,
    load_options_of,
    offered,
    option,
)
from specdec.loading.names import model_name
from specdec.values import Options, only

if TYPE_CHECKING:
    from rich.console import Console

    from drafters.mtp.convention import Concat, Feedback
    from drafters.training.trainer import Speedup
    from specdec.extensions.training.run import TrainingPlan
    from specdec.extensions.training.run_folder import Questions


_MODEL_HELP = "Target: built-in name, folder or hub name."
_DATA = (
    option(
        "--data",
        "JSONL of questions (messages, prompt or question a line); the target writes the answers. Repeatable.",
        FILE,
        multiple=True,
        required=True,
    ),
    option(
        "--output",
        "Folder. An unfinished run goes on; a run made from something else is refused.",
        click.Path(path_type=Path, file_okay=False),
        required=True,
    ),
    flag("--overwrite", "Start anew: remove checkpoints and head of an earlier run there."),
    option("--checkpoint-every", "Steps between checkpoints.", COUNT, 250),
    option("--held-out-every", "Steps between measurements of acceptance on questions that are held out.", COUNT, 250),
    option(
        "--patience",
        "End after so many measurements in which the acceptance length has not risen by more than 0.01, and keep the "
        "best head. Default: make all steps and keep the last.",
        COUNT,
    ),
)
_DECAY = option("--decay", "Loss weight of step i is decay^i.", default=0.8)
_AUX_LAYERS = option(
    "--aux-layers",
    "States that the head reads, e.g. 2,4,5: 2 is the state after 2 layers. Default: 2, N//2, N-3.",
    Numbers(0),
)
_INTERMEDIATE_SIZE = option("--intermediate-size", "Of the head's MLP. Default: the target's.", COUNT)
_RUN = (
    option("--held-out", "Questions that only measure.", COUNT, 256),
    option("--max-new-tokens", "Longest answer.", click.IntRange(2), 512),
    option("--max-length", "Longest training sequence.", click.IntRange(3), 1024),
    flag("--answers-only", "Only let the target answer (several files in parallel, say)."),
    flag("--compile", "Run the loss through torch.compile."),
    option("--seed", default=0),
    load_options(
        offered("train"),
        {
            "max_num_seqs": {"default": 64, "help": "Questions answered at once."},
            "backend": {"type": click.Choice([name for name in KINDS if name != "batch_invariant"])},
        },
    ),
)
_STEPS_OF_WARMUP = 25
"""Steps for each of the warm-up of block-parallel heads: 4 %, as DeepSpec has it."""
_INTERRUPTED = 130
"""Exit status of a command that was ended by Ctrl-C, as shells count it: 128 + SIGINT."""


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
@option("--model", _MODEL_HELP, model_name, "gsm-llama")
@added(_DATA)
@option("--draft-vocab-size", "Default: the target's whole vocabulary.", COUNT)
@added((_INTERMEDIATE_SIZE, _AUX_LAYERS))
@option("--steps", default=1500)
@option("--batch-size", default=48)
@option("--ttt-steps", "Steps of the training-time test.", default=5)
@option("--learning-rate", default=1e-3)
@added((_DECAY, *_RUN))
def eagle3(**options: Any) -> None:
    """Train an EAGLE-3 head; the result is OUTPUT/head, in the layout that other engines read too."""
    _run(options, "eagle3", only(options, ("draft_vocab_size", "intermediate_size", "aux_layers")))


@train.command(epilog=examples("specdec train mtp --data questions.jsonl --output run --steps 200 --ttt-steps 3"))
@option("--model", _MODEL_HELP, model_name, "gsm-deepseek")
@added(_DATA)
@option("--module", "Checkpoint that holds the module. Default: the target's own.")
@option("--steps", default=1000)
@option("--batch-size", default=48)
@option("--ttt-steps", "Drafts in a row that the module is trained for.", default=4)
@option("--learning-rate", default=2e-4)
@load_options(["mtp_concat", "mtp_feedback"])
@added((_DECAY, *_RUN))
def mtp(module: str | None, mtp_concat: Concat, mtp_feedback: Feedback, **options: Any) -> None:
    """Go on training a multi-token-prediction module for several drafts in a row; the result is OUTPUT/head.

    Its checkpoint reads [embedding, hidden]; what is fed back it does not say: draft with the same --mtp-feedback.
    """
    from drafters.checkpoints.tensor_files import locate
    from specdec.loading.names import resolve

    source = module or options["model"]
    revision = options["revision"]
    if module is None and revision is not None:
        source = str(locate(source, revision))
    _run(options, "mtp", {"module": resolve(source), "mtp_concat": mtp_concat, "mtp_feedback": mtp_feedback})


@train.command(epilog=examples("specdec train block --data questions.jsonl --output run --kind dflash"))
@option("--model", _MODEL_HELP, model_name, "gsm-llama")
@added(_DATA)
@option(
    "--kind",
    "dspark: each draft also depends on the one before it, by a Markov head. dflash: it does not.",
    click.Choice(["dspark", "dflash"]),
    "dspark",
)
@option(
    "--slots",
    "anchor-first: a slot predicts the token after it. fill-in: its own; a block has one slot more. "
    "Default: anchor-first for dspark, fill-in for dflash.",
    click.Choice(["anchor-first", "fill-in"]),
)
@option("-k --num-speculative-tokens ttt_steps", "Drafts of a block.", COUNT, 7)
@option("--num-layers", None, COUNT, 2)
@added((_INTERMEDIATE_SIZE, _AUX_LAYERS))
@option("--mask-token-id", "Token of slots that wait for a draft. Default: the vocabulary's last.", click.IntRange(0))
@option("--markov-rank", "Of dspark. Default: a fourth of the target's width, at most 256.", COUNT)
@flag("--confidence", "Of dspark: also train a confidence head, which predicts whether a draft is accepted.")
@option("--num-anchors", "Blocks of a sequence in a step.", COUNT, 32)
@option("--gamma", "Loss weight of draft j+1 is exp(-j/gamma).", click.FloatRange(0, min_open=True), 4.0)
@option("--steps", default=1500)
@option("--batch-size", default=48)
@option("--learning-rate", default=6e-4)
@added(_RUN)
def block(gamma: float, **options: Any) -> None:
    """Train a block-parallel head; the result is OUTPUT/head, in DeepSpec's layout (dspark) or z-lab's (dflash)."""
    options |= {"decay": exp(-1 / gamma), "warmup_steps": options["steps"] // _STEPS_OF_WARMUP}
    shape = ("kind", "slots", "num_layers", "intermediate_size", "aux_layers", "mask_token_id", "markov_rank")
    _run(options, "block", only(options, (*shape, "confidence", "num_anchors")))


def _run(options: Options, family: str, chosen: Options) -> None:
    """Let the target answer, then train; whatever can be found wrong is found before the target answers."""
    from rich.console import Console

    from drafters.training.data import read_questions
    from drafters.training.state import TrainConfig
    from specdec.extensions.training.run import plan_training
    from specdec.extensions.training.run_folder import AnswerLimits, answer_prepared, prepare_questions
    from specdec.model import SpeculativeModel
    from specdec.run_files import check_writable

    limits = AnswerLimits(options["max_new_tokens"], options["max_length"])
    config = TrainConfig(**only(options, TrainConfig.__dataclass_fields__))
    asked = [read_questions(path) for path in options["data"]]
    output = options["output"]
    console = Console()
    check_writable(output)
    load = load_options_of({name: options[name] for name in offered("train")}, cuda_graphs=False)
    model = SpeculativeModel.from_pretrained(options["model"], **load.as_arguments())
    questions = [prepare_questions(model, each, limits) for each in asked]
    try:
        if options["answers_only"]:
            for each in questions:
                answer_prepared(model, each, output, console)
            return
        _train(options, plan_training(model, family, chosen, config, options["held_out"]), questions, console)
    except KeyboardInterrupt:
        click.echo(f"\ninterrupted; {_kept(output)}; the same command goes on from there", err=True)
        raise click.exceptions.Exit(_INTERRUPTED) from None


def _train(options: Options, plan: TrainingPlan, questions: Sequence[Questions], console: Console) -> None:
    from drafters.training.data import AnswerSet
    from specdec.extensions.training.run_folder import answer_prepared, locked

    output = options["output"]
    plan.check_questions(questions)
    with locked(output):
        # What the answers come from; a question's key covers prompts, target and the longest answer.
        from specdec.extensions.training.run_folder import Setting

        counted = [
            f"{path}, {len(each.prompts)} questions" for path, each in zip(options["data"], questions, strict=True)
        ]
        plan.claim(
            output,
            {
                "data": Setting([each.digest for each in questions], "; ".join(counted)),
                "max_new_tokens": Setting(options["max_new_tokens"]),
                "max_length": Setting(options["max_length"]),
            },
            overwrite=options["overwrite"],
        )
        speedup = None if (output / "head").exists() else _timed(plan, questions, console)
        answers = [answer_prepared(plan.model, each, output, console) for each in questions]
        plan.model.close()  # its KV cache, most of a GPU, is memory to train in
        result = plan.run(AnswerSet.joined(answers), output, console, options["max_new_tokens"], speedup)
    click.echo(f"the head is in {result.folder}")


def _timed(plan: TrainingPlan, questions: Sequence[Questions], console: Console) -> Speedup | None:
    """Show what acceptance pays on this machine; None, which is said, where there is no memory to measure that."""
    from specdec.errors import CacheTooSmallError, OutOfDeviceMemoryError

    try:
        rounds = plan.round_seconds(questions)
    except (CacheTooSmallError, OutOfDeviceMemoryError) as error:
        console.print(f"no speed-up can be predicted: {error}", highlight=False, soft_wrap=True)
        return None
    console.print(str(rounds), highlight=False, soft_wrap=True)
    return rounds.speedup


def _kept(output: Path) -> str:
    from drafters.training.state import checkpoints
    from specdec.extensions.training.run_folder import kept_answers

    found = checkpoints(output)
    return f"the last checkpoint is {found[-1]}" if found else f"{kept_answers(output)} answers are kept in {output}"
