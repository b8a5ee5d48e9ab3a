"""Options that several eval commands share, and the objects made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specdec.cli.options import (
    COUNT,
    DEFAULT_MODEL,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    Numbers,
    added,
    flag,
    load_options,
    load_options_of,
    offered,
    option,
    sampling_of,
)
from specdec.loading import names
from specdec.values import Options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from evals.report.terminal import RunProgress
    from evals.runs.conversations import Asking, Configuration, ModelSpec
    from evals.runs.executor import Executor
    from evals.runs.store import RunStore


FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)


class _Different(Numbers):
    """Without repeats."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(super().convert(value, param, ctx)))


NUMBERS = _Different(1)
OWN_NAMES = {"num_speculative_tokens": "--num-speculative-tokens", "max_num_seqs": "--batch-size", "seed": "--seed"}
"""Load options that the eval commands have under a name of their own, which is not about loading alone."""

model_options = added(
    (
        option(
            "--model",
            "Built-in name, folder or hub name, also of a head that names its target; default gsm-llama.",
            names.model_name,
        ),
        load_options(offered("eval", OWN_NAMES)),
    )
)

draft_option = option(
    "--draft",
    "Folder or hub name of the head; auto = the built-in one, or the one given alone as --model.",
    names.draft_name,
    "auto",
)

data_options = added(
    (
        option(
            "--data",
            "mt_bench, gsm8k, humaneval, spec_bench, arithmetic, a .jsonl file or a hub name.",
            required=True,
        ),
        option("--data-dir", "Folder with the known sets; default $SPECDEC_DATA.", FOLDER),
        option("--limit", "Take N questions, spread evenly over the set.", COUNT),
    )
)

K_HELP = "default the draft's own: 5 of a head, 8 of lookup, what pays of a small model"
OWN_K = -1
"""Stands for it until the model is loaded."""
ks_option = option("-k --num-speculative-tokens --k ks", f"Drafts a round; 1,3,5 sweeps; {K_HELP}.", NUMBERS)
seed_option = option("--seed", default=0)
_ASKED = (
    option("--system", "A system prompt before every conversation."),
    flag("--no-chat-template", "Send the messages as plain text."),
    seed_option,
)


def batch_size_option(default: int) -> Callable[[Any], Any]:
    """The number of questions in one batch."""
    return option("--batch-size", "Questions at a time.", COUNT, default)


def max_new_tokens_option(default: int = 512) -> Callable[[Any], Any]:
    """How long an answer may be."""
    return option("--max-new-tokens", None, COUNT, default)


asking_options = added((max_new_tokens_option(), TEMPERATURE, TOP_K, TOP_P, *_ASKED, batch_size_option(1)))
greedy_options = added((max_new_tokens_option(), *_ASKED, batch_size_option(32)))
output_option = option("--output", "Write the JSON document here.", FILE)
run_dir_option = option("--run-dir", "Folder of the run; default runs/<hash of its settings>.", FOLDER)

output_options = added(
    (
        output_option,
        option("--report", "Write a self-contained HTML page here.", FILE),
        flag("--explain", "Print the sentence that defines each number."),
        option("--spec-bench-dir", "Write answer files in Spec-Bench's schema here.", FOLDER),
        run_dir_option,
    )
)

DEFAULT_WORKERS = 2
ray_options = added(
    (
        option(
            "--ray",
            "Spread the questions over Ray workers (a cluster's address; without one, this machine).",
            is_flag=False,
            flag_value="local",
            metavar="[ADDRESS]",
        ),
        option("--workers", "Ray workers.", COUNT, DEFAULT_WORKERS),
    )
)


def make_asking(options: Options) -> Asking:
    """How questions are sent, final after `settle`. Raises click.UsageError: a sampling option at temperature 0."""
    from evals.runs.conversations import Asking

    # The configurations get the same questions one after the other: none may find what another has left.
    params = sampling_of(options, cache_prefix=False)
    return Asking(params, not options["no_chat_template"], options["system"], options["seed"])


def settle(asking: Asking, facts: Mapping[str, Options]) -> Asking:
    """Turn the template off, with a warning that names the cost, when a model has none."""
    from evals.data.datasets import warn_without_template

    if not asking.templated or all(one["chat_template_sha256"] for one in facts.values()):
        return asking
    warn_without_template()
    return replace(asking, templated=False)


def settle_k(arm: Configuration, facts: Mapping[str, Options]) -> Configuration:
    """With the K that its model was loaded for, where none was asked for."""
    own = facts[arm.model]["engine"]["num_speculative_tokens"]
    return replace(arm, k=own, name=arm.name.replace(f"K={OWN_K}", f"K={own}")) if arm.k == OWN_K else arm


def model_name(options: Options, draft: str | None) -> str:
    """The target: as given, or the built-in one of its own head. Raises click.UsageError: a head without target."""
    from specdec.loading.heads import split_draft
    from specdec.loading.names import BUILTIN_HEADS

    given: str | None = options["model"]
    if given is None and draft is not None and split_draft(draft)[0] not in (None, *BUILTIN_HEADS):
        raise click.UsageError(f"the head {draft!r} needs its target: give --model")
    return given or DEFAULT_MODEL


def make_spec(options: Options, draft: str | None, k: int) -> ModelSpec:
    """The model to load, for at most `k` drafts a round; OWN_K: as many as its kind of draft has by default."""
    from evals.runs.conversations import ModelSpec

    seqs = max([options["batch_size"], *options.get("predict_batch_sizes", ())])
    load = load_options_of(options, num_speculative_tokens=None if k == OWN_K else k, max_num_seqs=seqs)
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
        executor = RayExecutor(specs, workers=workers)
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


def parse_arm(text: str, defaults: Options) -> Options:
    """One side of a comparison: a head, or key=value pairs of draft, k, backend and dtype joined by commas.

    >>> parse_arm("draft=my-head,k=3", {"draft": "auto", "k": 5, "dtype": "auto"})
    {'draft': 'my-head', 'k': 3, 'dtype': 'auto'}

    Raises:
        click.BadParameter: an unknown key, or a K that is not a whole number.
    """
    if "=" not in text:
        return {**defaults, "draft": text}
    parts = (part.partition("=") for part in text.split(","))
    found: Options = {"k" if key == "num_speculative_tokens" else key: value for key, _, value in parts}
    if set(found) - {"draft", "k", "backend", "dtype"} or not all(found.values()):
        raise click.BadParameter(f"{text!r}: give a head, or key=value pairs of draft, k, backend, dtype")
    if "k" in found:
        if not found["k"].isdigit():
            raise click.BadParameter(f"{text!r}: k must be a whole number")
        found["k"] = int(found["k"])
    return {**defaults, **found}
