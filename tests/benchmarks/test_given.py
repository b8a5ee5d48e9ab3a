"""What benchmarks refuse before anything is built: options that would do nothing, and values without meaning."""

from __future__ import annotations

import doctest
from pathlib import Path
from threading import Thread
from typing import Any

import click
import pytest
from click.testing import CliRunner

import benchmarks.bench_round
import benchmarks.bench_serving
import benchmarks.given

ROUND, SERVING = benchmarks.bench_round, benchmarks.bench_serving
REFUSED = {
    "round, greedy share": (ROUND, "--greedy-share 0.5", "--greedy-share would do nothing: without --sampled"),
    "round, trace": (ROUND, "--rows 1,8 --trace 1,32", "--trace 1,32: only batches of --rows 1,8 can be traced"),
    "round, share": (ROUND, "--sampled --greedy-share 2", "2.0 is not in the range"),
    "round, asks": (ROUND, "--asks nothing,more", "'more' is not one of 'nothing', 'penalties'"),
    "round, no numbers": (ROUND, "--drafts 1,x", "'x' is not a valid integer range"),
    "round, no rows": (ROUND, "--rows 0", "0 is not in the range x>=1"),
    "round, prompt": (ROUND, "--prompt 9 5", "--prompt 9 5: the smaller one first"),
    "round, acceptance": (ROUND, "--acceptance 1.5", "1.5 is not in the range"),
    "round, folder": (ROUND, "--out nowhere/x", "there is no folder nowhere"),
    "serving, output": (SERVING, "--output 9 3", "--output 9 3: the smaller one first"),
    "serving, folder": (SERVING, "--out nowhere/x", "there is no folder nowhere"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_do_nothing_is_refused_first(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, options, message = REFUSED[name]
    monkeypatch.setattr(module, "random_pair", lambda *_: pytest.fail("built before it was refused"))
    given = options.split() if "--out" in options else [*options.split(), "--out", str(tmp_path / "x")]
    done = CliRunner().invoke(module.main, given)
    assert done.exit_code == 2, done.output
    assert message in " ".join(done.output.split())


class Built(Exception):
    """The options were accepted."""


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (ROUND, "--sampled --greedy-share 1,0.5 --rows 1 --trace 1"),
        (ROUND, "--rows 2"),  # of the default batches to trace, none is measured
        (SERVING, "--repeats 2 --sampled-share 0.5"),
        (SERVING, "--shared-prefix 64 --no-prefix-caching"),
    ],
)
def test_what_is_read_is_accepted(module: Any, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def built(*_: Any, **__: Any) -> None:
        raise Built

    monkeypatch.setattr(module, "random_pair", built)
    done = CliRunner().invoke(module.main, [*options.split(), "--out", str(tmp_path / "x")])
    assert isinstance(done.exception, Built), done.output


def test_examples_are_lines_of_their_own_in_the_help() -> None:
    for module in (ROUND, SERVING):
        said = CliRunner().invoke(module.main, ["--help"]).output
        shown = [line for line in said.splitlines() if "python -m benchmarks." in line]
        assert len(shown) == (module.__doc__ or "").count("python -m benchmarks.")


def test_the_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(benchmarks.given)
    assert outcome.failed == 0 and outcome.attempted == 2


def test_a_list_converts_a_default_only_once() -> None:
    given = benchmarks.given.Listed(click.IntRange(1))
    assert given.convert(given.convert("1,2", None, None), None, None) == [1, 2]
    with pytest.raises(click.BadParameter):
        given.convert("0", None, None)


def test_processes_take_turns(tmp_path: Path) -> None:
    waiting = Thread(target=benchmarks.given.wait_for, args=(tmp_path / "turn",))
    waiting.start()
    while not (tmp_path / "turn.ready").exists():
        assert waiting.is_alive()
    (tmp_path / "turn").touch()
    waiting.join(10)
    assert not waiting.is_alive()
