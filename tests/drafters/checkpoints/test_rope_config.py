"""RoPE in a head's config.json: both spellings are read, written together, and refused where they disagree."""

from __future__ import annotations

from typing import Any

import pytest

from drafters.checkpoints.config_fields import resolve_rope, rope_to_config
from drafters.errors import HeadLoadError
from drafters.rope import RopeSpec

YARN = {"factor": 4.0, "truncate": False}
SPECS = [
    RopeSpec(),
    RopeSpec(theta=5e5, max_positions=64),
    RopeSpec(theta=1e6, kind="yarn", max_positions=64, scaling=(("factor", 4.0), ("truncate", False))),
    RopeSpec(kind="linear", scaling=(("factor", 2.0),)),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(
    "dropped", [(), ("rope_parameters",), ("rope_theta", "rope_scaling")], ids=["both", "old", "new"]
)
def test_what_is_written_is_read_in_either_spelling(spec: RopeSpec, dropped: tuple[str, ...]) -> None:
    config = {key: value for key, value in rope_to_config(spec).items() if key not in dropped}
    assert resolve_rope(config).value == spec


def test_nothing_said_is_the_default_and_the_report_says_so() -> None:
    field = resolve_rope({})
    assert field.value == RopeSpec() and field.source == "theta: default; type: default"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "contradicts itself about rope_theta"),
        (
            {"rope_scaling": {"type": "yarn", **YARN}, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
            "contradicts itself about RoPE",
        ),
        ({"rope_scaling": {"type": "longrope"}}, "'longrope' of this head is not among default, linear"),
        ({"rope_scaling": 3}, "rope_scaling must be an object, not 3"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"a part of the head dimension \(0.5\)"),
        ({"rope_parameters": {"factor": 2.0}}, r"keys that are not understood: \['factor'\]"),
        ({"rope_scaling": {"type": "yarn", "factor": "4"}}, r"keys that are not understood: \['factor'\]"),
    ],
)
def test_what_is_not_understood_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(HeadLoadError, match=words):
        resolve_rope(config)
