"""RopeSpec to and from a head's config.json (old keys `rope_theta`, `rope_scaling`; new key `rope_parameters`)."""

from __future__ import annotations

from typing import Any

from drafters.checkpoints.config_fields import Config, Field, lookup, read
from drafters.errors import HeadLoadError
from drafters.rope import ROPE_KINDS, RopeSpec

_MROPE = ("mrope_section", "mrope_interleaved")
_NOT_SCALING = ("rope_type", "type", "rope_theta", "partial_rotary_factor", *_MROPE)


def resolve_rope(config: Config, first_position: int = 0) -> Field:
    """Rotary embedding of the head that `config` describes; the target's is never looked at.

    Of mrope, whose positions of text are one number three times, the plain embedding remains.

    Args:
        first_position: see `RopeSpec`.

    Raises:
        HeadLoadError: the two spellings disagree, or the kind is not supported.
    """
    _check_whole(lookup(config, "partial_rotary_factor"))
    theta = read(config, "rope_theta", float, "rope_theta", "rope_parameters.rope_theta", default=10000.0)
    positions = read(config, "max_position_embeddings", int, default=2048)
    spellings = {key: lookup(config, key) for key in ("rope_scaling", "rope_parameters") if lookup(config, key)}
    scalings = {key: _scaling(key, value) for key, value in spellings.items()}
    if len(set(scalings.values())) > 1:
        raise HeadLoadError(f"config.json contradicts itself about RoPE: {spellings}")
    kind, scaling = next(iter(scalings.values()), ("default", ()))
    spec = RopeSpec(theta.value, kind, positions.value, scaling, first_position)
    source = "config " + ", ".join(scalings) if scalings else "default"
    if any(value.get("mrope_section") for value in spellings.values()):
        source += " (mrope: of text all three positions are one)"
    return Field("rope", spec, f"theta: {theta.source}; type: {source}")


def _scaling(key: str, value: Any) -> tuple[str, tuple[tuple[str, float | bool], ...]]:
    if not isinstance(value, dict):
        raise HeadLoadError(f"config.json: {key} must be an object, not {value!r}")
    _check_whole(value.get("partial_rotary_factor"))
    kind = value.get("rope_type", value.get("type", "default"))
    kind = "default" if kind == "mrope" else kind
    if kind not in ROPE_KINDS:
        raise HeadLoadError(f"RoPE type {kind!r} of this head is not among {', '.join(ROPE_KINDS)}")
    extra = {name: v for name, v in value.items() if name not in _NOT_SCALING and v is not None}
    odd = [name for name, v in extra.items() if kind == "default" or not isinstance(v, (int, float, bool))]
    if odd:
        raise HeadLoadError(f"config.json: {key} of RoPE type {kind!r} has keys that are not understood: {odd}")
    return kind, tuple(sorted(extra.items()))


def _check_whole(partial: Any) -> None:
    if partial not in (None, 1.0):
        raise HeadLoadError(
            f"RoPE over a part of the head dimension ({partial}) is not supported for this head; if the number is the "
            "target's and the head rotates all of it, give head_overrides partial_rotary_factor=null"
        )


def rope_to_config(rope: RopeSpec) -> dict[str, Any]:
    """Both spellings of a RopeSpec, for readers of either."""
    scaling = {"rope_type": rope.kind, **dict(rope.scaling)}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
        "max_position_embeddings": rope.max_positions,
    }
