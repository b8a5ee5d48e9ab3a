"""A head's config.json as resolved fields: each value with its source; rope, windows, and unread keys.

Besides the keys read here, configurations carry defaults that a transformers class always writes, keys copied from the
target, and keys of exporters newer than this file. Reports omit the first kind and list the others with their values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from attention.toml_tables import read_tables
from drafters.errors import HeadLoadError
from drafters.rope import ROPE_KINDS, RopeSpec, Scaling

Config = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
"""Of tensors, by their names."""
FamilyOptions = Mapping[str, Any]
"""A family's load options about reading its files, by name; in `recipe` those of `specdec train FAMILY`."""


@dataclass(frozen=True)
class ResolvedField:
    """One resolved property of a head: its name, its value, and the config key, tensor or rule that gave it."""

    name: str
    value: Any
    source: str


ResolvedFields = tuple[ResolvedField, ...]


@dataclass(frozen=True)
class HeadReport:
    """What a checkpoint was resolved to, for people: its folder, the checkpoint layout's name, every field with its
    source, and the number of stored parameters, vocabulary maps not counted."""

    path: Path
    layout: str
    fields: ResolvedFields
    num_parameters: int

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.layout}, {self.num_parameters / 1e6:.2f} M parameters"]
        wide = max(len(field.name) for field in self.fields)
        return "\n".join(lines + [f"  {f.name:<{wide}}  {f.value!s:<24}  {f.source}" for f in self.fields])


@runtime_checkable
class Reported(Protocol):
    """A head that describes the checkpoint it was loaded from; None where it was made in memory."""

    checkpoint_report: HeadReport | None


class PlacedConfig(dict[str, Any]):
    """A configuration whose values lie elsewhere in the file, or not in it.

    origins: by key (dotted where a nested key has one of its own), where its value is from, for reports.
    """

    def __init__(self, config: Config, origins: Mapping[str, str]) -> None:
        super().__init__(config)
        self.origins = origins


def place_of(config: Config, key: str) -> str:
    """Where the value of a dotted key is from, as reports show it: the key, or its origin."""
    origins = config.origins if isinstance(config, PlacedConfig) else {}
    first, dot, rest = key.partition(".")
    return origins.get(key) or origins.get(first, first) + dot + rest


def lookup(config: Config, key: str) -> Any:
    """Value of a dotted key ("eagle_config.norm_before_fc"), None when it or a parent is absent or null."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def read(
    config: Config, name: str, kind: type, *keys: str, default: Any = None, default_source: str = "default"
) -> ResolvedField:
    """Resolve a field from the first key (dotted; none means `name`) that is set; several set keys must agree.

    Args:
        kind: int, float, bool or str.
        default: used when no key is set; None makes a key mandatory. default_source: its origin, for reports.

    Raises:
        HeadLoadError: no key is set and no default given, keys disagree, or a value is of another kind.
    """
    keys = keys or (name,)
    found = {key: value for key in keys if (value := lookup(config, key)) is not None}
    if not found and default is None:
        raise HeadLoadError(f"config.json has no {' or '.join(keys)}")
    if not found:
        return ResolvedField(name, default, default_source)
    values = [_typed(key, value, kind) for key, value in found.items()]
    if any(value != values[0] for value in values):
        raise HeadLoadError(f"config.json contradicts itself about {name}: {found}")
    return ResolvedField(name, values[0], "config " + ", ".join(place_of(config, key) for key in found))


def _typed(key: str, value: Any, kind: type) -> Any:
    kinds = (int, float) if kind is float else kind
    if not isinstance(value, kinds) or (kind is not bool and isinstance(value, bool)):
        raise HeadLoadError(f"config.json: {key} must be {kind.__name__}, not {value!r}")
    return kind(value)


def by_presence(config: Config, tensors: Container[str], name: str, tensor: str, *keys: str) -> ResolvedField:
    """Resolve an optional module by whether its tensor is among `tensors`; config flags that are set must agree.

    Raises:
        HeadLoadError: a flag disagrees.
    """
    present = tensor in tensors
    for key in keys:
        flag = lookup(config, key)
        if flag is not None and bool(flag) != present:
            state = "has" if present else "has no"
            raise HeadLoadError(f"config.json says {key} = {flag!r}, but the checkpoint {state} {tensor}")
    return ResolvedField(name, present, f"{tensor} {'present' if present else 'absent'}")


def check_tensors(found: Shapes, expected: Shapes) -> None:
    """Compare a checkpoint's tensors (shapes by name) with the tensors of the module it was resolved to.

    Raises:
        HeadLoadError: tensors are missing, unknown or of another shape (all of them are named).
    """
    problems = [f"missing: {name} {list(expected[name])}" for name in sorted(expected.keys() - found.keys())]
    problems += [f"unknown: {name} {list(found[name])}" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"shape of {name}: {list(found[name])} instead of {list(expected[name])}"
        for name in sorted(found.keys() & expected.keys())
        if found[name] != expected[name]
    ]
    if problems:
        raise HeadLoadError("the checkpoint's tensors are not those of its configuration: " + "; ".join(problems))


UNKNOWN = "unknown keys"
"""Name of the field that lists keys unknown to this version."""

_KEYS = read_tables("drafters", "checkpoints/unread_keys.toml")
_ALWAYS, _EXPORTERS, _TARGETS = (
    re.compile("".join(_KEYS[kind].split())) for kind in ("always", "exporters", "targets")
)
_LAYER_LIST = re.compile(r"(.*\.)?\w*(layer_ids|aux_layers|layers_to_capture)")


def unread_fields(config: Config, known: Collection[str], layers_are_chosen: bool) -> ResolvedFields:
    """Report the keys of config.json that decide nothing, with their values.

    known: keys that are read, dotted where they are nested. layers_are_chosen: whether lists of layers in the file need
    not be understood.

    Raises:
        HeadLoadError: one of them lists layers in a spelling that is not known, and no other key does.
    """
    unread = {key: value for key, value in _flat(config) if key not in known and value not in (None, False, [], {})}
    listed = [key for key in unread if _LAYER_LIST.fullmatch(key)]
    understood = [key for key, value in _flat(config) if key in known and value and _LAYER_LIST.fullmatch(key)]
    if listed and not understood and not layers_are_chosen:
        raise HeadLoadError(
            f"config.json says {_said(unread, listed)}: whether these are layers whose output is read or aux layers is "
            "not known of this key; choose by head_overrides, as aux_layers=[2, 16, 29] (b: the state after b layers)"
        )
    told = {key for key in unread if not _is(_ALWAYS, key) and not _is(_EXPORTERS, key)}
    targets = {key for key in told if _is(_TARGETS, key)}
    kinds = {
        "keys of a target": (targets, "config.json: no engine reads them of a head"),
        UNKNOWN: (told - targets, "config.json: nothing here knows them; they change nothing"),
    }
    return tuple(ResolvedField(name, _said(unread, keys), note) for name, (keys, note) in kinds.items() if keys)


def _flat(config: Config) -> list[tuple[str, Any]]:
    """Keys at the top and in the objects that exporters make."""
    objects = [(key, config.get(key)) for key in ("eagle_config", "transformer_layer_config")]
    inner = [(f"{key}.{name}", own[name]) for key, own in objects if isinstance(own, Mapping) for name in own]
    return [*config.items(), *inner]


def _is(kind: re.Pattern[str], key: str) -> bool:
    """Whether a key is of a kind; a nested decoder-layer object has the same keys as any configuration."""
    return kind.fullmatch(key.removeprefix("transformer_layer_config.")) is not None


def _said(values: Config, keys: Collection[str]) -> str:
    return ", ".join(f"{key} = {_short(values[key])}" for key in sorted(keys))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


_WHERE = "in its config.json or, of an EAGLE head, by head_overrides"
_MROPE = ("mrope_section", "mrope_interleaved")
_NOT_SCALING = ("rope_type", "type", "rope_theta", "partial_rotary_factor", *_MROPE)


def resolve_rope(config: Config, first_position: int = 0) -> ResolvedField:
    """Rotary embedding of the head that `config` describes; the target's is never looked at. Of mrope, whose positions
    of text are one number three times, the plain embedding remains. first_position: see `RopeSpec`.

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
    source = "config " + ", ".join(place_of(config, key) for key in scalings) if scalings else "default"
    if any(value.get("mrope_section") for value in spellings.values()):
        source += " (mrope: of text all three positions are one)"
    return ResolvedField("rope", spec, f"theta: {theta.source}; type: {source}")


def _scaling(key: str, value: Any) -> tuple[str, Scaling]:
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
            f"target's and the head rotates all of it, give partial_rotary_factor=null {_WHERE}"
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


def resolve_windows(config: Config, num_layers: int) -> list[ResolvedField]:
    """Which layers have a sliding window, and its length. `layer_types` decides; `sliding_window` alone does not,
    because configurations copied from a target carry it for layers that never use it.

    Raises:
        HeadLoadError: another kind of layer, another number of layers, or a window that no layer type uses.
    """
    kinds, window = lookup(config, "layer_types"), lookup(config, "sliding_window")
    if kinds is None and lookup(config, "use_sliding_window") and window is not None:
        raise HeadLoadError(
            f"config.json says use_sliding_window = true (of {window}) and not which layers have it: give "
            f"layer_types=['sliding_attention'] (one word a layer), or use_sliding_window=false for none, {_WHERE}"
        )
    kinds = ["full_attention"] * num_layers if kinds is None else kinds
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        raise HeadLoadError(f"config.json: layer_types must be a list of {' and '.join(known)}, not {kinds!r}")
    near = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    if near and len(kinds) != num_layers:
        raise HeadLoadError(
            f"config.json says layer_types = {kinds}, but the head has {num_layers} layer(s): give layer_types with "
            f"one word for each {_WHERE}"
        )
    if not near:
        return [
            ResolvedField("windowed_layers", (), "no layer_types with a window"),
            ResolvedField("window", None, "no such layer"),
        ]
    source = f"config {place_of(config, 'layer_types')}"
    return [ResolvedField("windowed_layers", near, source), read(config, "window", int, "sliding_window")]
