"""Other ways in which an EAGLE-3 head's files can be meant: the same weights, another configuration.

Only choices that published exporters and engines really make differently, and that `head_overrides` can make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

from drafters.base import FINAL_NORM, Head
from drafters.checkpoints.config_fields import HeadReport
from drafters.eagle3.spec import Eagle3Spec


@runtime_checkable
class Rereadable(Head, Protocol):
    """A head whose tensors can be read by another specification."""

    spec: Eagle3Spec
    checkpoint_report: HeadReport | None

    def reread(self, spec: Eagle3Spec) -> Rereadable:
        """The same tensors under another spec of the same shapes."""


@dataclass(frozen=True)
class Reading:
    """One way to read a head.

    Attributes:
        name: what differs from the files as they were read, in words.
        spec: the head, read so.
        overrides: the `head_overrides` that choose it.
        cause: why the files were probably read otherwise.
    """

    name: str
    spec: Eagle3Spec
    overrides: Mapping[str, Any] = field(default_factory=dict)
    cause: str = ""

    def changed(self, name: str, cause: str, overrides: Mapping[str, Any], **changes: Any) -> Reading:
        """This reading with one more change."""
        whole = name if not self.overrides else f"{self.name}, {name}"
        causes = "; ".join(filter(None, (self.cause, cause)))
        return Reading(whole, replace(self.spec, **changes), {**self.overrides, **overrides}, causes)


def as_read(head: Rereadable) -> Reading:
    """The head as its files were read."""
    return Reading("as read", head.spec)


def other_readings(reading: Reading, num_layers: int, rope_theta: float | None) -> tuple[Reading, ...]:
    """Readings that differ from one in a single choice.

    Args:
        num_layers: N of the target. rope_theta: of the target's rotary embedding; None where it has no single one.
    """
    return (
        *_other_layers(reading, num_layers),
        *_other_feedback(reading),
        *_other_residual(reading),
        *_other_rope(reading, rope_theta),
    )


def _other_layers(reading: Reading, num_layers: int) -> list[Reading]:
    layers = reading.spec.aux_layers
    if layers == (FINAL_NORM,):
        return []
    later, earlier = (tuple(layer + by for layer in layers) for by in (1, -1))
    outputs = "the aux layers were given as layers whose output is meant (SpecForge, SGLang), and taken for boundaries"
    boundaries = (
        "the aux layers were given as boundaries (vLLM, speculators), and taken for layers whose output is meant"
    )
    default = (2, num_layers // 2, num_layers - 3)
    wanted = [
        ("all aux layers one later", later, outputs),
        ("all aux layers one earlier", earlier, boundaries),
        ("the default aux layers", default, "the head was trained on the default aux layers, 2, N//2, N-3"),
    ]
    for place, layer in enumerate(layers):
        for by, word in ((1, "later"), (-1, "earlier")):
            moved = (*layers[:place], layer + by, *layers[place + 1 :])
            wanted.append((f"aux layer {layer} one {word}", moved, f"aux layer {layer} is wrong"))
    found: dict[tuple[int, ...], Reading] = {}
    for name, aux_layers, cause in wanted:
        ascending = all(a < b for a, b in pairwise(aux_layers))
        fits = len(aux_layers) == len(layers) and ascending and aux_layers[0] >= 0 and aux_layers[-1] <= num_layers
        if fits and aux_layers != layers and aux_layers not in found:
            override = {"aux_layers": list(aux_layers)}
            found[aux_layers] = reading.changed(name, cause, override, aux_layers=aux_layers)
    return list(found.values())


def _other_feedback(reading: Reading) -> list[Reading]:
    feedback = "pre_norm" if reading.spec.feedback == "post_norm" else "post_norm"
    cause = "norm_output says otherwise than the head was trained" + (
        " (SpecForge wrote true for heads trained with the state before the norm)" if feedback == "pre_norm" else ""
    )
    name = f"{feedback} state fed back"
    return [reading.changed(name, cause, {"feedback": feedback}, feedback=feedback)]


def _other_residual(reading: Reading) -> list[Reading]:
    other = not reading.spec.norm_before_residual
    key, cause = "norm_before_residual", "norm_before_residual is absent or wrong, and readers differ in its default"
    return [reading.changed(f"{key} = {str(other).lower()}", cause, {key: other}, norm_before_residual=other)]


def _other_rope(reading: Reading, rope_theta: float | None) -> list[Reading]:
    rope = reading.spec.rope
    if rope_theta is None or rope_theta == rope.theta or rope.kind != "default":
        return []
    cause = "rope_theta is absent or wrong in the head's configuration; the target's fits"
    overrides = {"rope_theta": rope_theta, "rope_scaling": None, "rope_parameters": None}
    return [reading.changed(f"rope_theta {rope_theta:g}", cause, overrides, rope=replace(rope, theta=rope_theta))]
