"""Every load option reaches the worker from the eval commands and from lm-eval, and from the worker the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any

import click
import pytest
from click.testing import CliRunner

import specdec
from evals.cli import eval_options as shared
from evals.cli.main import evaluate
from evals.runs.conversations import ModelSpec, Worker
from specdec.cli.main import cli
from specdec.cli.options import offered
from specdec.errors import InvalidInputError
from specdec.options.kinds import Below1, Choice, Flag, Fraction, Overrides, Scales, Switch, Whole
from specdec.options.load_options import LoadOptions, option_of

FIELDS = {each.name: each for each in fields(LoadOptions)}


class Reached(Exception):
    """Thrown where a model would be loaded."""


def word(each: Field[Any]) -> str | None:
    """A value that is not the default, as a command line gives it; None for a flag."""
    kind = option_of(each).kind
    if isinstance(kind, Flag):
        return None
    if isinstance(kind, Switch):
        return "no"
    if isinstance(kind, Choice):
        return next(choice for choice in kind.words if choice != each.default)
    if isinstance(kind, Whole):
        return "7"
    if isinstance(kind, Overrides):
        return "rope_theta=5.5;feedback=post_norm"
    return "0.5" if isinstance(kind, (Fraction, Below1)) else "0.5:0.25;2:4" if isinstance(kind, Scales) else "abc"


def value(each: Field[Any]) -> Any:
    """The same as from_pretrained is to get it."""
    kind, text = option_of(each).kind, word(each)
    if isinstance(kind, Scales):
        return ((0.5, 0.25), (2.0, 4.0))
    if isinstance(kind, Overrides):
        return {"rope_theta": 5.5, "feedback": "post_norm"}
    if isinstance(kind, Switch):
        return False
    if isinstance(kind, Flag):
        return not each.default
    assert text is not None
    return int(text) if isinstance(kind, Whole) else 0.5 if text == "0.5" else text


EVERY = {name: value(each) for name, each in FIELDS.items()}


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run something that loads a model: what from_pretrained got by keyword."""
    found: list[dict[str, Any]] = []

    def from_pretrained(*_: Any, **options: Any) -> Any:
        found.append(options)
        raise Reached

    monkeypatch.setattr(specdec.SpeculativeModel, "from_pretrained", from_pretrained)

    def run(call: Callable[[], Any]) -> dict[str, Any]:
        found.clear()
        with pytest.raises(Reached):
            call()
        return found[0]

    return run


def invoke(*arguments: str) -> None:
    CliRunner().invoke(cli, arguments, catch_exceptions=False)


def flags(names: list[str], own: dict[str, str]) -> list[str]:
    """The command-line form of these options, under a command's own names for some."""
    given = []
    for name in names:
        text, no = word(FIELDS[name]), "no-" if FIELDS[name].default is True else ""
        given += [own.get(name, f"--{no}{name.replace('_', '-')}"), *([] if text is None else [text])]
    return given


def test_every_value_here_differs_from_the_default() -> None:
    assert all(EVERY[name] != each.default for name, each in FIELDS.items())


@pytest.mark.parametrize("command", [("generate", "hi"), ("inspect",)], ids=["generate", "inspect"])
def test_generate_and_inspect(loaded: Callable[..., dict[str, Any]], command: tuple[str, ...]) -> None:
    assert loaded(lambda: invoke(*command, *flags(offered("run"), {}))) == EVERY


@pytest.mark.parametrize("command", ["acceptance", "lossless", "compare"])
def test_eval(loaded: Callable[..., dict[str, Any]], command: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    sides = ["k=7", "k=3"] if command == "compare" else []
    arguments = [command, *sides, "--data", "arithmetic", "--limit", "2", *flags(offered("eval"), shared.OWN_NAMES)]
    assert loaded(lambda: invoke("eval", *arguments)) == EVERY


@pytest.mark.slow
def test_eval_gsm8k(loaded: Callable[..., dict[str, Any]], tmp_path: Any, monkeypatch: Any) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    given = flags(offered("eval"), shared.OWN_NAMES)
    assert loaded(lambda: invoke("eval", "gsm8k", "--tasks", "specdec_arithmetic", "--limit", "2", *given)) == EVERY


@pytest.mark.parametrize("method", [("eagle3",), ("mtp", "--module", "m")], ids=["eagle3", "mtp"])
def test_train(loaded: Callable[..., dict[str, Any]], method: tuple[str, ...], tmp_path: Any) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "How many?"}\n')
    names = offered("train")
    given = ["--data", str(tmp_path / "q.jsonl"), "--output", str(tmp_path / "run"), *flags(names, {})]
    expected = {name: EVERY[name] if name in names else each.default for name, each in FIELDS.items()}
    expected["cuda_graphs"] = False  # its target answers in large batches, and loads in a moment
    assert loaded(lambda: invoke("train", *method, *given)) == expected


def test_a_worker(loaded: Callable[..., dict[str, Any]]) -> None:
    spec = ModelSpec("m", options=LoadOptions.from_words(EVERY))
    assert loaded(lambda: Worker({"main": spec})) == EVERY


def test_lm_eval(loaded: Callable[..., dict[str, Any]]) -> None:
    utils = pytest.importorskip("lm_eval.utils")
    from evals.accuracy.lm_eval_model import SpecdecLM

    text = ",".join(f"{name}={word(each) or str(not each.default).lower()}" for name, each in FIELDS.items())
    given = utils.simple_parse_args_string(f"pretrained=m,{text}")
    assert loaded(lambda: SpecdecLM(**given)) == EVERY
    assert loaded(lambda: SpecdecLM("m", max_length=9, batch_size="4"))["max_model_len"] == 9
    assert loaded(lambda: SpecdecLM("m", max_length=9, batch_size="4"))["max_num_seqs"] == 4
    with pytest.raises(InvalidInputError, match="max_length and max_model_len are the same model argument"):
        SpecdecLM("m", max_length=9, max_model_len=9)
    with pytest.raises(InvalidInputError, match=r"unknown model_args 'no_such': known are pretrained, .*page_size"):
        SpecdecLM("m", no_such=1)


def test_every_eval_command_offers_every_option_or_its_own_name_for_it() -> None:
    context = click.Context(evaluate)
    for name in evaluate.list_commands(context):
        command = evaluate.get_command(context, name)
        assert command is not None
        words = {text for parameter in command.params for text in parameter.opts}
        expected = {shared.OWN_NAMES.get(each, f"--{each.replace('_', '-')}") for each in offered("eval")}
        if name == "diverge":  # reads with the target alone, in batches of its own
            expected -= {*shared.OWN_NAMES.values(), "--self-test", "--tensor-parallel-size"}
        assert name == "lm-eval" or expected - words == set(), name


def test_numbers_in_a_list_are_taken_once() -> None:
    assert shared.NUMBERS.convert("3, 1,3", None, None) == (3, 1)
    assert shared.NUMBERS.convert((5,), None, None) == (5,)
    with pytest.raises(click.BadParameter, match="0 is not in the range"):
        shared.NUMBERS.convert("1,0", None, None)
