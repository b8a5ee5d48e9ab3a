"""Commands of other packages: found by entry points, named when they cannot be loaded, never in the way of the rest."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from specdec.cli import lazy as plugins
from specdec.cli.lazy import DISTRIBUTION, GROUP, Plugin, PluginError, find_plugins

ROOT = Path(__file__).resolve().parents[3]
EVAL = ("eval", "evals.cli.main:evaluate")


def specdec(*arguments: str, first: Path) -> subprocess.CompletedProcess[str]:
    """The command in a fresh process that finds packages in `first` before this checkout's."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(first), str(ROOT)]), "COLUMNS": "400"}
    command = [sys.executable, "-m", "specdec.cli.main", *arguments]
    return subprocess.run(command, env=environment, cwd=os.sep, capture_output=True, text=True, check=False)


def distribution(folder: Path, name: str, entries: str) -> None:
    """Metadata of an installed distribution that adds commands."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")


def test_no_file_of_specdec_names_the_package_that_adds_eval() -> None:
    named = [path for path in (ROOT / "specdec").rglob("*.py") if "evals" in path.read_text("utf-8")]
    assert named == []


def test_a_checkout_is_read_from_its_pyproject(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the metadata of an older install say."""
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    found = find_plugins([])
    assert [(name, plugin.entry.value, plugin.distribution) for name, plugin in found.items()] == [
        (*EVAL, DISTRIBUTION)
    ]


@pytest.mark.parametrize("project", [None, '[project]\nname = "another"\n'], ids=["none", "another project's"])
def test_an_installed_copy_is_read_from_its_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, project: str | None
) -> None:
    if project is not None:
        (tmp_path / "pyproject.toml").write_text(project)
    distribution(tmp_path, DISTRIBUTION, " = ".join(EVAL))
    monkeypatch.syspath_prepend(tmp_path)
    assert find_plugins([], root=tmp_path)["eval"].entry.value == EVAL[1]


@pytest.mark.slow
def test_a_package_that_shadows_evals_is_named_and_the_rest_works(tmp_path: Path) -> None:
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "__init__.py").write_text("")
    listed = specdec("--help", first=tmp_path)
    assert listed.returncode == 0 and "Generate text" in listed.stdout
    for done in (listed, specdec("eval", "lossless", first=tmp_path), specdec("eval", "--help", first=tmp_path)):
        text = "".join((done.stdout + done.stderr).split())  # help texts are wrapped
        assert f"needsitsownpackage'evals'at{ROOT / 'evals'}," in text and "Traceback" not in text
        assert f"finds{tmp_path / 'evals' / '__init__.py'};removeorrenamewhatshadowsit" in text
    assert done.returncode == 2


def test_a_folder_that_is_no_package_shadows_nothing(tmp_path: Path) -> None:
    """Python prefers a package to a folder without __init__.py, wherever that stands in sys.path."""
    (tmp_path / "evals").mkdir()
    assert "Measure acceptance" in specdec("--help", first=tmp_path).stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "says"),
    [
        (None, "No module named 'no_such_tool'"),
        ("import not_installed_anywhere", "No module named 'not_installed_anywhere'"),
        ("command = 1", "no_such_tool:command of tool is no click command"),
        ("", "has no attribute 'command'"),
    ],
    ids=["missing", "its dependency is missing", "no command", "no attribute"],
)
@pytest.mark.cases(1)
def test_a_command_that_cannot_be_loaded_says_why(tmp_path: Path, module: str | None, says: str) -> None:
    distribution(tmp_path, "tool", "shout = no_such_tool:command")
    if module is not None:
        (tmp_path / "no_such_tool.py").write_text(module)
    listed, ran = specdec("--help", first=tmp_path), specdec("shout", first=tmp_path)
    assert listed.returncode == 0 and says in " ".join(listed.stdout.split()) and "Measure acceptance" in listed.stdout
    assert ran.returncode == 2 and says in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.slow
def test_another_distribution_adds_a_command(tmp_path: Path) -> None:
    distribution(tmp_path, "tool", "shout = some_tool:shout")
    (tmp_path / "some_tool.py").write_text(
        "import click\n@click.command(short_help='Serve it.')\ndef shout():\n    click.echo('served')\n"
    )
    assert "Serve it." in specdec("--help", first=tmp_path).stdout
    assert specdec("shout", first=tmp_path).stdout == "served\n"


@pytest.mark.slow
def test_two_commands_of_one_name_are_refused(tmp_path: Path) -> None:
    distribution(tmp_path, "tool", "eval = some_tool:shout")
    done = specdec("--help", first=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "tool adds the command 'eval', which specdec-hf has; uninstall one" in done.stderr
    assert specdec("generate", "--help", first=tmp_path).returncode == 0


def test_a_built_in_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError, match="adds the command 'eval', which specdec itself has"):
        find_plugins(["eval"])


def test_own_commands_are_checked_for_shadowing_others_not() -> None:
    entry = EntryPoint("dumps", "json:dumps", GROUP)
    with pytest.raises(PluginError, match="needs its own package 'json'"):
        Plugin(entry, DISTRIBUTION).load()
    with pytest.raises(PluginError, match="is no click command"):
        Plugin(entry, "another").load()
