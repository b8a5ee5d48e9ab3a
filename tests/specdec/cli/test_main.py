"""`specdec --help` is quick, lists everything, and errors of the tree are one message with exit code 2."""

from __future__ import annotations

import logging
import os
import runpy
import subprocess
import sys
import warnings

import click
import pytest
from click.testing import CliRunner

from evals.cli.main import evaluate
from specdec.cli.lazy import LazyCommand, LazyGroup
from specdec.cli.main import cli
from specdec.cli.options import Numbers
from specdec.errors import InvalidInputError

HEAVY = ("torch", "transformers", "numpy", "matplotlib", "scipy", "datasets", "lm_eval", "ray", "rich")


@click.command()
def failing() -> None:
    raise InvalidInputError("K is -1; allowed are 0 to 32:\n  pass --k 5")


@click.command()
def broken() -> None:
    raise ZeroDivisionError("a bug")


GROUP = LazyGroup(
    "demo",
    lazy={
        "failing": LazyCommand(f"{__name__}:failing", "Fails."),
        "absent": LazyCommand("no_such_module_anywhere:command", "Cannot be imported."),
        "broken": LazyCommand(f"{__name__}:broken", "Has a bug."),
    },
)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _module())


def _module() -> object:
    class Module:
        pass

    module = Module()
    module.__dict__.update(failing=failing, broken=broken)
    return module


def test_help_lists_commands_that_cannot_even_be_imported() -> None:
    result = CliRunner().invoke(GROUP, ["--help"])
    assert result.exit_code == 0
    assert "Cannot be imported." in result.output


def test_an_error_of_the_tree_keeps_its_lines_and_has_exit_code_2() -> None:
    result = CliRunner().invoke(GROUP, ["failing"])
    assert result.exit_code == 2
    pointer = "See docs/reference/errors.md#invalidinputerror"
    assert result.output == f"Error: K is -1; allowed are 0 to 32:\n  pass --k 5\n{pointer}\n"


def test_a_command_whose_package_is_missing_says_so() -> None:
    result = CliRunner().invoke(GROUP, ["absent"])
    assert result.exit_code == 2
    assert "needs the module 'no_such_module_anywhere', which is not installed" in result.output


def test_a_bug_is_not_hidden() -> None:
    result = CliRunner().invoke(GROUP, ["broken"])
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize("group", [cli, evaluate], ids=["specdec", "eval"])
def test_every_listed_command_names_a_module_and_an_attribute(group: LazyGroup) -> None:
    for name in group.lazy:
        module, _, attribute = group.lazy[name].target.partition(":")
        assert module.split(".")[0] in ("specdec", "evals") and attribute.isidentifier()


@pytest.mark.parametrize("arguments", [["--help"], ["eval", "--help"]])
@pytest.mark.cases(1)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from click.testing import CliRunner; from specdec.cli.main import cli\n"
        f"result = CliRunner().invoke(cli, {arguments!r})\n"
        f"print(result.exit_code, [m for m in {HEAVY!r} if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "0 []"


ABSENT = [
    ["generate", "--file", "gone.jsonl"],
    ["generate", "--model", "./gone", "hi"],
    ["generate", "--draft", "./gone,lookup", "hi"],
    ["generate", "--draft", "lookp", "hi"],
    ["batch", "gone.jsonl", "out.jsonl"],
    ["chat", "--model", "gsm-lama"],
    ["inspect", "./gone"],
    ["inspect", "auto", "--target", "./gone"],
    ["export", "./gone", "--layout", "specforge", "--out", "out"],
    ["train", "eagle3", "--data", "gone.jsonl", "--output", "out"],
    ["eval", "acceptance", "--data", "gone.jsonl"],
    ["eval", "lossless", "--data", "arithmetic", "--model", "./gone"],
]


@pytest.mark.slow
def test_what_is_not_there_is_an_error_before_torch_is_imported() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from specdec.cli.main import cli\n"
        f"print([CliRunner().invoke(cli, words).exit_code for words in {ABSENT!r}], 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == f"{[2] * len(ABSENT)} False"


@pytest.mark.slow
def test_help_is_quick() -> None:
    """It takes less processor time than importing torch alone, which does not depend on how busy the machine is."""

    def processor_seconds(*arguments: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert processor_seconds("-m", "specdec.cli.main", "--help") < processor_seconds("-c", "import torch") / 2


def test_what_torchao_logs_at_its_import_is_not_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Since `import specdec`. Other messages of the same loggers are."""
    ao, pytree = logging.getLogger("torchao"), logging.getLogger("torch.utils._pytree")
    ao.warning("Failed to load /x/torchao/_C_mxfp8.cpython-310-x86_64-linux-gnu.so: Could not load this library")
    ao.warning("Failed to load the weights")
    kind = type("KernelPreference", (), {})
    pytree.warning("%s is an Enum subclass and is now natively supported by torch.compile as an opaque", kind)
    pytree.warning("another thing about pytrees")
    assert [r.getMessage() for r in caplog.records] == ["Failed to load the weights", "another thing about pytrees"]


def test_the_package_runs_as_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["specdec", "--version"])
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("specdec", run_name="__main__")
    assert capsys.readouterr().out.startswith("specdec, version ")


def test_the_help_ends_with_a_command_that_needs_no_extra() -> None:
    assert CliRunner().invoke(cli, ["--help"]).output.rstrip().endswith(" specdec doctor")


def test_a_list_of_numbers_is_read_as_it_is_typed() -> None:
    assert Numbers(0).convert("2, 0,2", None, None) == (2, 0, 2), "a repeat is for those who know whether it may be"
    for typed in ("a", "1,", "-1"):
        with pytest.raises(click.BadParameter):
            Numbers(0).convert(typed, None, None)


@pytest.mark.parametrize(
    ("typed", "said"),
    [("genrate", "Did you mean 'generate'?"), ("zzz", "Commands are generate, chat"), ("--versoin", "'--version'")],
)
def test_an_unknown_command_names_the_nearest_or_all(typed: str, said: str) -> None:
    result = CliRunner().invoke(cli, [typed])
    assert result.exit_code == 2 and said in result.output
