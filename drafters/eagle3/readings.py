"""Other ways to read an EAGLE-3 head's files: single choices that published exporters and engines make differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from drafters.base import FINAL_NORM, Head, OtherReading
from drafters.eagle3.spec import Eagle3Spec


def other_readings(
    spec: Eagle3Spec, reread: Callable[[Eagle3Spec], Head], num_layers: int, rope_theta: float | None
) -> tuple[OtherReading, ...]:
    """A head of this spec under every other reading.

    Args:
        reread: the head's tensors under another spec of the same shapes.
        num_layers: N of the target. rope_theta: of the target's rotary embedding; None where it has no single one.
    """
    found: dict[str, OtherReading] = {}
    for name, field, value, overrides, cause in _changes(spec, num_layers, rope_theta):
        other = replace(spec, **{field: value})
        if other != spec and str(value) not in found:
            found[str(value)] = OtherReading(name, field, cause, overrides, reread(other))
    return tuple(found.values())


def _changes(
    spec: Eagle3Spec, num_layers: int, rope_theta: float | None
) -> Iterator[tuple[str, str, Any, dict[str, Any], str]]:
    """Of each change: its name, the field of the spec, its other value, the `head_overrides` for it, and the cause."""
    for name, layers, cause in _aux_layers(spec.aux_layers, num_layers):
        yield name, "aux_layers", layers, {"aux_layers": list(layers)}, cause
    feedback = "pre_norm" if spec.feedback == "post_norm" else "post_norm"
    cause = "norm_output says otherwise than the head was trained" + (
        " (SpecForge wrote true for heads trained with the state before the norm)" if feedback == "pre_norm" else ""
    )
    yield f"{feedback} state fed back", "feedback", feedback, {"feedback": feedback}, cause
    key, other = "norm_before_residual", not spec.norm_before_residual
    cause = f"{key} is absent or wrong, and readers differ in its default"
    yield f"{key} = {str(other).lower()}", key, other, {key: other}, cause
    if rope_theta is not None and spec.rope.kind == "default":
        cause = "rope_theta is absent or wrong in the head's configuration; the target's fits"
        overrides = {"rope_theta": rope_theta, "rope_scaling": None, "rope_parameters": None}
        yield f"rope_theta {rope_theta:g}", "rope", replace(spec.rope, theta=rope_theta), overrides, cause


def _aux_layers(layers: tuple[int, ...], num_layers: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """All layers one later or earlier, the default ones, and each layer alone one later or earlier."""
    if layers == (FINAL_NORM,):
        return
    outputs = "the aux layers were given as layers whose output is meant (SpecForge, SGLang), and taken for aux layers"
    numbered = (
        "the aux layers were given as numbered here (vLLM, speculators), and taken for layers whose output is meant"
    )
    default = (2, num_layers // 2, num_layers - 3)
    wanted = [
        ("all aux layers one later", tuple(layer + 1 for layer in layers), outputs),
        ("all aux layers one earlier", tuple(layer - 1 for layer in layers), numbered),
        ("the default aux layers", default, "the head was trained on the default aux layers, 2, N//2, N-3"),
    ]
    for place, layer in enumerate(layers):
        for by, word in ((1, "later"), (-1, "earlier")):
            moved = (*layers[:place], layer + by, *layers[place + 1 :])
            wanted.append((f"aux layer {layer} one {word}", moved, f"aux layer {layer} is wrong"))
    for name, other, cause in wanted:
        ascending = all(a < b for a, b in pairwise(other))
        if len(other) == len(layers) and ascending and other[0] >= 0 and other[-1] <= num_layers:
            yield name, other, cause
