"""Resolved fields: a value of a head together with where it came from, so that a reader can check every one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from drafters.errors import HeadLoadError

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Field:
    """One resolved property of a head: its name, its value, and the config key, tensor or rule that gave it."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True)
class HeadReport:
    """What a checkpoint was resolved to, for people.

    Attributes:
        path: the folder.
        layout: name of the checkpoint layout.
        fields: every resolved field with its source.
        num_parameters: stored in the checkpoint, vocabulary maps not counted.
    """

    path: Path
    layout: str
    fields: tuple[Field, ...]
    num_parameters: int

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.layout}, {self.num_parameters / 1e6:.2f} M parameters"]
        wide = max(len(field.name) for field in self.fields)
        return "\n".join(lines + [f"  {f.name:<{wide}}  {f.value!s:<24}  {f.source}" for f in self.fields])


@runtime_checkable
class Reported(Protocol):
    """A head that describes the checkpoint it was loaded from; None where it was made in memory."""

    checkpoint_report: HeadReport | None


def lookup(config: Config, key: str) -> Any:
    """Value of a dotted key ("eagle_config.norm_before_fc"), None when it or a parent is absent or null."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def read(
    config: Config, name: str, kind: type, *keys: str, default: Any = None, default_source: str = "default"
) -> Field:
    """Resolve a field from the first key that is set; several set keys must agree.

    Args:
        kind: int, float, bool or str.
        keys: dotted keys; none means `name`.
        default: used when no key is set; None means that one must be.
        default_source: where the default is from, for reports.

    Raises:
        HeadLoadError: no key is set and there is no default, keys disagree, or a value is of another kind.
    """
    found = {key: lookup(config, key) for key in keys or (name,) if lookup(config, key) is not None}
    if not found and default is None:
        raise HeadLoadError(f"config.json has no {' or '.join(keys or (name,))}")
    if not found:
        return Field(name, default, default_source)
    values = [_typed(key, value, kind) for key, value in found.items()]
    if any(value != values[0] for value in values):
        raise HeadLoadError(f"config.json contradicts itself about {name}: {found}")
    return Field(name, values[0], "config " + ", ".join(found))


def _typed(key: str, value: Any, kind: type) -> Any:
    good = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if not good:
        raise HeadLoadError(f"config.json: {key} must be {kind.__name__}, not {value!r}")
    return kind(value)


def by_presence(config: Config, name: str, tensor: str, present: bool, *keys: str) -> Field:
    """Resolve an optional module by its tensor; config flags that are set must agree.

    Raises:
        HeadLoadError: a flag disagrees.
    """
    for key in keys:
        flag = lookup(config, key)
        if flag is not None and bool(flag) != present:
            state = "has" if present else "has no"
            raise HeadLoadError(f"config.json says {key} = {flag!r}, but the checkpoint {state} {tensor}")
    return Field(name, present, f"{tensor} {'present' if present else 'absent'}")


def check_tensors(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Compare a checkpoint's tensors with those of the module it was resolved to.

    Args:
        found, expected: shapes by name.

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
