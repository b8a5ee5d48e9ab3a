"""Modules that moved into `specdec.extensions` are found under their old names, as the same modules."""

from __future__ import annotations

import importlib
import sys

import pytest

from specdec.import_names import OLD_NAMES


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
