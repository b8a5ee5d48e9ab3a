"""Options that several eval commands share, and the objects made from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.options import DEFAULT_MODEL, added, check_sampling, load_options, load_options_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from evals.report.terminal import RunProgress
    from evals.runs.conversations import Asking, ModelSpec
    from evals.runs.executor import Executor
    from evals.runs.store import RunStore


Options = dict[str, Any]
"""What click gives to a command, by name."""
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


class Listed(click.ParamType):
    """A comma-separated list of values of another type, without repeats."""

    def __init__(self, name: str, of: click.ParamType) -> None:
        self.name, self._of = name, of

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(dict.fromkeys(self._of.convert(part.strip(), param, ctx) for part in str(value).split(",")))


NUMBERS = Listed("n,n,...", click.IntRange(1))
OWN_NAMES = {"num_speculative_tokens": "--k", "max_num_seqs": "--batch-size", "seed": "--seed"}
"""Load options that the eval commands have under a name of their own, which says more than how to load."""

model_options = added(
    (
        click.option(
            "--model",
            default=None,
            help="Built-in name, folder or hub name, also of a head that names its target; default gsm-llama.",
        ),
        load_options("eval", without=OWN_NAMES),
    )
)

draft_option = click.option(
    "--draft",
    default="auto",
    help="Folder or hub name of the head; auto = the built-in one, or the one given alone as --model.",
)

data_options = added(
    (
        click.option(
            "--data",
            required=True,
            help="mt_bench, gsm8k, humaneval, spec_bench, arithmetic, a .jsonl file or a hub name.",
        ),
        click.option("--data-dir", type=FOLDER, help="Folder with the known sets; default $SPECDEC_DATA."),
        click.option(
            "--limit", type=click.IntRange(1), default=None, help="Take N questions, spread evenly over the set."
        ),
    )
)

asking_options = added(
    (
        click.option("--max-new-tokens", type=click.IntRange(1), default=512, show_default=True),
        click.option("--temperature", type=click.FloatRange(0.0), default=0.0, show_default=True, help="0 is greedy."),
        click.option("--top-k", type=click.IntRange(0), default=0, show_default=True, help="0 is off."),
        click.option("--top-p", type=click.FloatRange(0.0, 1.0, min_open=True), default=1.0, show_default=True),
        click.option("--system", default=None, help="A system prompt before every conversation."),
        click.option("--no-chat-template", is_flag=True, help="Send the messages as plain text."),
        click.option("--seed", type=int, default=0, show_default=True),
        click.option("--batch-size", type=click.IntRange(1), default=1, show_default=True, help="Questions at a time."),
    )
)

k_list_option = click.option("--k", "ks", type=NUMBERS, default="5", help="Drafts a round; 1,3,5 sweeps.")
warmup_option = click.option("--warmup", type=click.IntRange(0), default=1, help="Passes that are not measured.")
seed_option = click.option("--seed", type=int, default=0)
together_option = click.option("--batch-size", type=click.IntRange(1), default=32, help="Questions at a time.")
output_option = click.option("--output", type=FILE, help="Write the JSON document here.")
run_dir_option = click.option(
    "--run-dir", type=FOLDER, default=None, help="Folder of the run; default runs/<hash of its settings>."
)

output_options = added(
    (
        output_option,
        click.option("--report", type=FILE, default=None, help="Write a self-contained HTML page here."),
        click.option("--explain", is_flag=True, help="Print the sentence that defines each number."),
        click.option(
            "--spec-bench-dir", type=FOLDER, default=None, help="Write answer files in Spec-Bench's schema here."
        ),
        run_dir_option,
    )
)

ray_option = click.option(
    "--ray",
    is_flag=False,
    flag_value="local",
    default=None,
    metavar="[ADDRESS]",
    help="Spread the questions over Ray workers (a cluster's address; without one, this machine).",
)
DEFAULT_WORKERS = 2
workers_option = click.option("--workers", type=click.IntRange(1), default=DEFAULT_WORKERS, help="Ray workers.")


def make_asking(options: Mapping[str, Any]) -> Asking:
    """How questions are asked, final after `settle`. Raises click.UsageError: a sampling option at temperature 0."""
    from evals.runs.conversations import Asking
    from specdec.requests.sampling import SamplingParams

    names = ("max_new_tokens", "temperature", "top_k", "top_p")
    check_sampling(options)
    # The configurations are asked the same questions one after the other: none may find what another has left.
    params = SamplingParams(**{name: options[name] for name in names}, cache_prefix=False)
    return Asking(params, not options["no_chat_template"], options["system"], options["seed"])


def settle(asking: Asking, facts: Mapping[str, Mapping[str, Any]]) -> Asking:
    """Turn the template off, with a warning that names the cost, when a model has none."""
    from dataclasses import replace

    from evals.data.datasets import warn_without_template

    if asking.templated and any(one["chat_template_sha256"] is None for one in facts.values()):
        warn_without_template()
        return replace(asking, templated=False)
    return asking


def model_name(options: Mapping[str, Any], draft: str | None) -> str:
    """The target: as given, or the built-in one of its own head. Raises click.UsageError: a head without target."""
    from specdec.loading.heads import split_draft

    given: str | None = options["model"]
    if given is None and draft is not None and split_draft(draft)[0] not in (None, "auto"):
        raise click.UsageError(f"the head {draft!r} needs its target: give --model")
    return given or DEFAULT_MODEL


def make_spec(options: Mapping[str, Any], draft: str | None, k: int) -> ModelSpec:
    """The model to load, for at most `k` drafts a round."""
    from evals.runs.conversations import ModelSpec

    seqs = max([options["batch_size"], *options.get("predict_batch_sizes", ())])
    load = load_options_of(options, num_speculative_tokens=k, max_num_seqs=seqs)
    return ModelSpec(model_name(options, draft), draft, load)


@contextmanager
def open_executor(specs: Mapping[str, ModelSpec], ray: str | None, workers: int) -> Iterator[Executor]:
    """The models in this process, or on Ray workers.

    Raises:
        click.UsageError: a number of workers without Ray.
    """
    from evals.runs.conversations import Worker

    if ray is None and workers != DEFAULT_WORKERS:
        raise click.UsageError(f"--workers {workers} is of Ray's workers: give --ray with it")
    if ray is None:
        yield Worker(specs)
        return
    from evals.runs.executor import RayExecutor, connect

    with connect(ray):
        device = next(iter(specs.values())).options.device
        executor = RayExecutor(specs, workers=workers, device=None if device is None else str(device))
        try:
            yield executor
        finally:
            executor.close()


@contextmanager
def recorded(
    folder: Path | None, settings: Options, questions: int, arms: int
) -> Iterator[tuple[RunStore, RunProgress]]:
    """What a run keeps, in the given folder or one named by its settings, and its progress bar."""
    from rich.console import Console

    from evals.data.datasets import digest
    from evals.report.terminal import RunProgress
    from evals.runs.store import RunStore

    with (
        RunStore(folder or Path("runs") / digest(settings)[:16], settings) as store,
        RunProgress(Console(stderr=True), questions, arms) as progress,
    ):
        yield store, progress


def parse_arm(text: str) -> dict[str, str]:
    """One side of a comparison: a head, or key=value pairs of draft, k, backend and dtype joined by commas.

    >>> parse_arm("my-head"), parse_arm("draft=my-head,k=3")
    ({'draft': 'my-head'}, {'draft': 'my-head', 'k': '3'})

    Raises:
        click.BadParameter: an unknown key, or a K that is not a whole number.
    """
    if "=" not in text:
        return {"draft": text}
    pairs: Sequence[tuple[str, str, str]] = [part.partition("=") for part in text.split(",")]
    found = {key: value for key, _, value in pairs}
    unknown = sorted(set(found) - {"draft", "k", "backend", "dtype"})
    if unknown or not all(found.values()):
        raise click.BadParameter(f"{text!r}: give a head, or key=value pairs of draft, k, backend, dtype")
    if not found.get("k", "0").isdigit():
        raise click.BadParameter(f"{text!r}: k must be a whole number")
    return found
