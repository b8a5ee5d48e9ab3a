"""Settings: values besides weights that a model computes with, as far as they can be read: attributes of its modules
and configurations, functions of their classes and of the files that define them.

Rounds call the modules, so a changed setting counts from the next round on, and cached results of earlier ones are
stale. Some settings are read only at loading: the plan of attention reads some then, a graph all.
"""

from __future__ import annotations

import marshal
import operator
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.hf.mixing import MIXING_FUNCTIONS
from specdec.values import Fields

_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (dict, list, tuple, set)
_FUNCTIONS = (FunctionType, staticmethod, classmethod, property)
_MISSING = object()
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_is_hf_initialized", "config"}
_OF_EVERY_MODEL = frozenset(
    ("all_tied_weights_keys", "name_or_path", "loss_type", "generation_config", "kernel_config")
)
_SIZES = frozenset(("in_features", "out_features", "num_embeddings", "embedding_dim"))
"""Sizes of torch's layers, whose forwards take them from the weight."""
_MOVING = frozenset(("gradient_checkpointing", "max_seq_len_cached"))
"""Names that training and forwards change themselves."""
_OURS = frozenset(("rows", "fused_weight", "fused_bias", "holders"))
"""Attributes of `specdec.compiler.siblings`; specdec's other names begin with `_specdec`."""
_NOT_IN_FORWARDS = frozenset(
    (
        *("use_cache", "return_dict", "torchscript", "architectures", "id2label", "label2id", "problem_type"),
        *("dtype", "torch_dtype", "transformers_version", "tie_word_embeddings", "initializer_range", "name_or_path"),
        *("output_attentions", "output_hidden_states", "is_encoder_decoder", "tokenizer_class", "pruned_heads"),
    )
)
"""Configuration keys about a model's origin and about the form of its output."""
_READ_BY_ATTENTION = ("sliding", "window", "chunk", "softcap", "attention_type", "layer_type", "mask")
"""Parts of the names of attributes, on any module, that the plan of attention was made from."""
_READ_FROM_CONFIGURATIONS = (*_READ_BY_ATTENTION, "rope", "original_max", "logit", "multiplier", "_layers")
_CALLS = ("__call__", "_call_impl", "_wrapped_call_impl")
_HANDLES = ("_specdec_layer", "_specdec_recurrence")
"""Attributes of the modules whose attention or recurrence rounds compute."""
_NOT_LOOKED_AT = ("torch", "attention", "drafters", "specdec", "__main__", "builtins")
"""Packages whose files' functions do not count; a notebook's are redefined whenever a cell is run."""
_MOST_ITEMS = 256
"""Items of a container that are compared one by one."""


class _Place(NamedTuple):
    """The place of a setting. built_in: it was read at loading, and rounds do not read it again."""

    owner: str
    held_by: Fields
    name: str
    built_in: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.owner, self.name


_Places = Iterator[_Place]


class ChangedSetting(NamedTuple):
    """A setting that is another now: its name in words, and its values."""

    name: str
    before: object
    now: object


class Held:
    """Compares by identity, and for a tensor by torch's count of writes to it."""

    def __init__(self, value: object) -> None:
        self.value = value
        counted = isinstance(value, Tensor) and not value.is_inference()
        self.version = value._version if counted else 0  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and other.value is self.value and other.version == self.version

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """The same in another process. Of a function, of a static method's or a property's too, its code."""
        function = getattr(self.value, "__func__", getattr(self.value, "fget", self.value))
        # Version 2 has no references between objects, of which the later ones depend on what else the process holds.
        code = function.__code__ if isinstance(function, FunctionType) else None
        return f"{type(self.value).__qualname__} {marshal.dumps(code, 2)!r}"


@dataclass(frozen=True)
class Settings:
    """The settings of all modules of `roots` at one moment.

    Attributes:
        moving: keys of settings that forwards change themselves, which do not count.
        places, values: of all settings; a look at their identity nearly always decides. Values are held, so nothing new
            can have their identity.
        contents: of containers and tensors, by number among the values, in a form that compares what is in them.
        sizes: how many attributes each module had. kinds: their classes.
    """

    roots: tuple[nn.Module, ...]
    moving: frozenset[tuple[str, str]]
    places: tuple[_Place, ...]
    values: list[Any]
    contents: dict[int, Any]
    modules: tuple[nn.Module, ...]
    sizes: list[int]
    kinds: list[type]

    @classmethod
    def of(
        cls, *roots: nn.Module, moving: frozenset[tuple[str, str]] = frozenset(), built_in_only: bool = False
    ) -> Settings:
        """The current settings; or only those that rounds do not read again."""
        named = [
            (f"{type(root).__name__} {name}" if number else name, module)
            for number, root in enumerate(roots)
            for name, module in root.named_modules()
        ]
        found = (place for place in _places(named) if place.key not in moving)
        places = tuple(place for place in found if place.built_in or not built_in_only)
        values = _read(places)
        modules = tuple(module for _, module in named)
        deep = {i: _comparable(v) for i, v in enumerate(values) if isinstance(v, (Tensor, *_CONTAINERS))}
        return cls(roots, moving, places, values, deep, modules, _sizes(modules), list(map(type, modules)))

    def settled(self) -> Settings:
        """The settings after forwards that ran since, without those that were changed or added meanwhile."""
        moved = {place.key for place, _, _ in self._different()}
        added = {place.key for place in self._added()}
        return Settings.of(*self.roots, moving=self.moving | moved | added)

    def in_words(self) -> str:
        """All settings, in a form that is the same in another process."""
        return repr([(place.key, _comparable(value)) for place, value in zip(self.places, self.values, strict=True)])

    def renewed(self, built_in_only: bool = False) -> Settings:
        """The current settings, including new ones; or only those that rounds do not read again."""
        return Settings.of(*self.roots, moving=self.moving, built_in_only=built_in_only)

    @property
    def are_same(self) -> bool:
        """Whether none has changed, and no module has an attribute more, or is of another class."""
        return (
            _sizes(self.modules) == self.sizes
            and list(map(type, self.modules)) == self.kinds
            and next(self._different(), None) is None
        )

    def change(self) -> ChangedSetting | None:
        """The first setting that is another now."""
        for place, before, now in self._different():
            return ChangedSetting(f"{place.owner}.{place.name}", before, now)
        return None

    def hidden(self) -> str | None:
        """Name of an attribute that a module has got since and that hides one of its class: a function, for example."""
        if _sizes(self.modules) == self.sizes:
            return None
        owners = {id(vars(module)): type(module) for root in self.roots for module in root.modules()}
        hiding = (each for each in self._added() if hasattr(owners.get(id(each.held_by)), each.name))
        return next((f"{each.owner}.{each.name}" for each in hiding), None)

    def _added(self) -> _Places:
        known = {place.key for place in self.places} | self.moving
        return (place for place in Settings.of(*self.roots).places if place.key not in known)

    def _different(self) -> Iterator[tuple[_Place, Any, Any]]:
        now = _read(self.places)
        if not all(map(operator.is_, now, self.values)):
            for number, (before, found) in enumerate(zip(self.values, now, strict=True)):
                same = before is found or (type(before) in _PLAIN and before == found)
                if not same and number not in self.contents:
                    yield self.places[number], before, found
        for number, before in self.contents.items():
            if before != (found := _comparable(now[number])):
                yield self.places[number], before, found


def _sizes(modules: Iterable[nn.Module]) -> list[int]:
    return [len(module.__dict__) for module in modules]


def _read(places: Iterable[_Place]) -> list[Any]:
    return [held_by.get(name, _MISSING) for _, held_by, name, _ in places]


def _comparable(value: Any, depth: int = 3) -> Any:
    """Nested tuples of plain values, and of others by identity."""
    if type(value) in _PLAIN:
        return value
    if type(value) not in _CONTAINERS or not depth or len(value) > _MOST_ITEMS:
        return Held(value)
    if isinstance(value, dict):
        return tuple((key, _comparable(item, depth - 1)) for key, item in value.items())
    return frozenset(value) if isinstance(value, set) else tuple(_comparable(item, depth - 1) for item in value)


def _places(named: list[tuple[str, nn.Module]]) -> _Places:
    modules = [module for _, module in named]
    for name, module in named:
        yield from _of_module(name or type(module).__name__, module)
    yield from _of_configurations(named)
    attending = {kind for module in modules if _attends(module) for kind in type(module).__mro__}
    kinds = dict.fromkeys(kind for module in modules for kind in type(module).__mro__)
    for kind in kinds:
        yield from _of_class(kind, kind in attending)
    for name in dict.fromkeys(kind.__module__ for kind in kinds if kind not in PreTrainedModel.__mro__):
        if name in sys.modules and name.partition(".")[0] not in _NOT_LOOKED_AT:
            own = vars(sys.modules[name])
            for function, value in list(own.items()):  # that the code of a module's class calls by name
                if isinstance(value, FunctionType) and function not in MIXING_FUNCTIONS:
                    yield _Place(name, own, function, "mask" in function or "attention" in function)


def _attends(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__ or any(handle in vars(module) for handle in _HANDLES)


def _of_module(name: str, module: nn.Module) -> _Places:
    own = vars(module)
    attends = _attends(module)
    left_out = _OF_EVERY_MODULE | _MOVING | _OURS
    if type(module).__module__.startswith("torch."):
        left_out |= _SIZES
    is_model = isinstance(module, PreTrainedModel)
    for attribute in own:
        of_model = is_model and (attribute in _OF_EVERY_MODEL or attribute.startswith("_"))
        if attribute in left_out or of_model or "dropout" in attribute or attribute.startswith("_specdec"):
            continue
        yield _Place(name, own, attribute, attends or any(part in attribute for part in _READ_BY_ATTENTION))


def _of_configurations(named: list[tuple[str, nn.Module]]) -> _Places:
    seen: set[int] = set()
    for name, module in named:
        config = vars(module).get("config")
        if config is None or id(config) in seen or not hasattr(config, "__dict__"):
            continue
        seen.add(id(config))
        for attribute in vars(config):
            without = attribute in _NOT_IN_FORWARDS or "dropout" in attribute or "_token_" in attribute
            if not without and not attribute.startswith("_"):
                built_in = any(part in attribute for part in _READ_FROM_CONFIGURATIONS)
                yield _Place(f"{name}.config".removeprefix("."), vars(config), attribute, built_in)


def _of_class(kind: type, attends: bool) -> _Places:
    if kind.__module__.partition(".")[0] in ("attention", "drafters", "specdec", "builtins"):
        return
    of_every_model = kind in PreTrainedModel.__mro__
    for name, value in list(vars(kind).items()):
        counts = name in _CALLS or not (of_every_model or name.startswith("__"))
        if counts and isinstance(value, _FUNCTIONS + _PLAIN):
            yield _Place(f"{kind.__module__}.{kind.__qualname__}", vars(kind), name, attends and not of_every_model)
