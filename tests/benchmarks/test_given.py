"""What benchmarks refuse before anything is built: options that would do nothing, and values without meaning."""

from __future__ import annotations

import doctest
from pathlib import Path
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
    "round, no numbers": (ROUND, "--drafts 1,x", "'1,x' is no list of whole numbers from 0 on"),
    "round, no rows": (ROUND, "--rows 0", "'0' is no list of whole numbers from 1 on"),
    "round, prompt": (ROUND, "--prompt 9 5", "--prompt 9 5: the smaller one first"),
    "round, acceptance": (ROUND, "--acceptance 1.5", "1.5 is not in the range"),
    "round, folder": (ROUND, "--out nowhere/x", "there is no folder nowhere"),
    "serving, rows": (SERVING, "--rows 4 --own 9", "--rows, --own would do nothing: a workload is measured"),
    "interference": (SERVING, "--interference --output 3 9", "--output would do nothing: --interference measures rows"),
    "no row left": (SERVING, "--interference --rows 32", "--rows 32 with --at-once 32: no row is left for prompts"),
    "prefix": (SERVING, "--shared-prefix 9 --sampled-share 1", "--sampled-share would do nothing: --shared-prefix"),
    "prefix beside": (SERVING, "--shared-prefix 9 --interference", "--shared-prefix is measured alone"),
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
        (SERVING, "--interference --rows 4"),
        (SERVING, "--shared-prefix 64 --own 8 --repeats 2"),
    ],
)
def test_what_is_read_is_accepted(module: Any, options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def built(*_: Any) -> None:
        raise Built

    monkeypatch.setattr(module, "random_pair", built)
    done = CliRunner().invoke(module.main, [*options.split(), "--out", str(tmp_path / "x")])
    assert isinstance(done.exception, Built), done.output


def test_every_option_is_of_some_kind_of_measurement() -> None:
    """An option that is added is read by all kinds, or is named beside those that read it."""
    known = {parameter.name for parameter in SERVING.main.params}
    assert {name for names in SERVING.OF_A_KIND.values() for name in names} <= known


def test_examples_are_lines_of_their_own_in_the_help() -> None:
    for module in (ROUND, SERVING):
        said = CliRunner().invoke(module.main, ["--help"]).output
        shown = [line for line in said.splitlines() if "python -m benchmarks." in line]
        assert len(shown) == (module.__doc__ or "").count("python -m benchmarks.")


def test_the_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(benchmarks.given)
    assert outcome.failed == 0 and outcome.attempted == 3


def test_numbers_convert_a_default_only_once() -> None:
    given = benchmarks.given.Numbers(1)
    assert given.convert(given.convert("1,2", None, None), None, None) == [1, 2]
    with pytest.raises(click.BadParameter):
        given.convert("0", None, None)
