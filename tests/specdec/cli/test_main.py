"""`specdec --help` is quick, lists everything, and errors of the tree are one message with exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from evals.cli.main import evaluate
from specdec.cli.lazy import LazyCommand, LazyGroup
from specdec.cli.main import cli
from specdec.errors import InvalidInputError

HEAVY = ("torch", "transformers", "numpy", "matplotlib", "scipy", "datasets", "lm_eval", "ray", "rich")


@click.command()
def failing() -> None:
    raise InvalidInputError("K is -1; allowed are 0 to 32; pass --k 5")


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


def test_an_error_of_the_tree_is_one_message_and_exit_code_2() -> None:
    result = CliRunner().invoke(GROUP, ["failing"])
    assert result.exit_code == 2
    assert result.output == "Error: K is -1; allowed are 0 to 32; pass --k 5\n"


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
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from click.testing import CliRunner; from specdec.cli.main import cli\n"
        f"result = CliRunner().invoke(cli, {arguments!r})\n"
        f"print(result.exit_code, [m for m in {HEAVY!r} if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "0 []"


@pytest.mark.slow
def test_help_is_quick() -> None:
    """It takes less processor time than importing torch alone, which does not depend on how busy the machine is."""

    def processor_seconds(*arguments: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert processor_seconds("-m", "specdec.cli.main", "--help") < processor_seconds("-c", "import torch") / 2
