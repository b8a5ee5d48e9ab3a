"""Modules under their old names, and another distribution that has our name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import specdec
import specdec.cli
from specdec.import_names import OLD_NAMES, other_distribution


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("specdec.ray", "specdec.extensions.batches.ray"),
        ("specdec.handoff.moved", "specdec.extensions.handoff.moved"),
        ("specdec.service.openai_format", "specdec.extensions.openai_format"),
        *list(OLD_NAMES.items())[:3],
    ],
)
def test_an_old_name_is_the_same_module(old: str, new: str) -> None:
    found, right = importlib.import_module(old), importlib.import_module(new)
    assert found is right and found.__name__ == new and found.__spec__ is not None and found.__spec__.name == new
    assert sys.modules[old] is right


def test_every_old_name_leads_somewhere() -> None:
    for new in OLD_NAMES.values():
        importlib.import_module(new)


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"specdec\.grammars\.nothing"):
        importlib.import_module("specdec.grammars.nothing")


def test_another_distribution_of_our_name_is_named_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its command calls `specdec.cli:main`, which is our package wherever both lie in one folder."""
    assert other_distribution() == ""
    (tmp_path / "specdec-0.2.0.dist-info").mkdir()
    (tmp_path / "specdec-0.2.0.dist-info" / "METADATA").write_text("Name: specdec\nVersion: 0.2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = r"named 'specdec' \(0\.2\.0\) is installed.*pip uninstall specdec, then install specdec-hf again"
    with pytest.warns(specdec.SpecdecWarning, match=words):
        specdec._prepare()
    with pytest.raises(SystemExit, match=words):
        specdec.cli.refuse()
