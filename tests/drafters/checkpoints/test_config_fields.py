"""Resolved fields: every value says which key gave it, and keys that disagree are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drafters.checkpoints.config_fields import HeadReport, ResolvedField, by_presence, check_tensors, lookup, read
from drafters.errors import HeadLoadError

CONFIG = {"a": 3, "deep": {"a": 3, "b": 2.0, "none": None}, "flag": True, "text": "x"}


def test_dotted_keys_are_looked_up_and_null_is_absent() -> None:
    found = [lookup(CONFIG, key) for key in ("a", "deep.b", "deep.none", "deep.c", "a.b", "c.d")]
    assert found == [3, 2.0, None, None, None, None]


def test_a_field_names_every_key_that_gave_it() -> None:
    assert read(CONFIG, "a", int) == ResolvedField("a", 3, "config a")
    assert read(CONFIG, "x", int, "a", "deep.a", "missing") == ResolvedField("x", 3, "config a, deep.a")
    assert read(CONFIG, "x", float, "a").value == 3.0
    assert read(CONFIG, "x", int, default=7, default_source="a rule") == ResolvedField("x", 7, "a rule")


@pytest.mark.parametrize(
    ("name", "kind", "keys", "words"),
    [
        ("x", int, (), "config.json has no x"),
        ("x", int, ("p", "q.r"), "config.json has no p or q.r"),
        ("x", float, ("a", "deep.b"), "contradicts itself about x"),
        ("x", int, ("flag",), "flag must be int, not True"),
        ("x", float, ("flag",), "flag must be float, not True"),
        ("x", bool, ("a",), "a must be bool, not 3"),
        ("x", int, ("text",), "text must be int, not 'x'"),
    ],
)
def test_a_field_that_cannot_be_resolved_is_refused(name: str, kind: type, keys: tuple[str, ...], words: str) -> None:
    with pytest.raises(HeadLoadError, match=words):
        read(CONFIG, name, kind, *keys)


@pytest.mark.parametrize("present", [True, False])
def test_a_tensor_decides_and_a_flag_must_agree(present: bool) -> None:
    tensors = ["norm.weight"] if present else ["other.weight"]
    field = by_presence({"flag": present}, tensors, "norm", "norm.weight", "flag", "absent")
    assert field == ResolvedField("norm", present, f"norm.weight {'present' if present else 'absent'}")
    with pytest.raises(HeadLoadError, match=f"says flag = {not present}, but the checkpoint has.* norm.weight"):
        by_presence({"flag": not present}, tensors, "norm", "norm.weight", "flag")


def test_all_tensors_that_differ_are_named_at_once() -> None:
    expected = {"a": (2, 3), "b": (4,), "c": (1,)}
    check_tensors(expected, dict(expected))
    with pytest.raises(HeadLoadError) as error:
        check_tensors({"a": (3, 2), "c": (1,), "d": (5,)}, expected)
    words = ("missing: b [4]", "unknown: d [5]", "shape of a: [3, 2] instead of [2, 3]")
    assert all(word in str(error.value) for word in words)


def test_a_report_lists_every_field_with_its_source() -> None:
    fields: tuple[Any, ...] = (
        ResolvedField("taps", (1, 2), "config taps"),
        ResolvedField("norm", True, "norm.weight present"),
    )
    lines = str(HeadReport(Path("head"), "SafeAILab", fields, 1_500_000)).splitlines()
    assert lines[0] == "head: SafeAILab, 1.50 M parameters"
    assert [line.split() for line in lines[1:]] == [
        ["taps", "(1,", "2)", "config", "taps"],
        ["norm", "True", "norm.weight", "present"],
    ]
