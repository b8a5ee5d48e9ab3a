"""Whether a wrapped model is still what the engine was built around.

The engine runs the user's own model and reads its weights at every forward, so new values in place (`load_state_dict`,
an optimiser's step, an adapter merged in place) are used from the next round on, in captured graphs too: those
read the same memory. What it has taken over at loading is another matter: the dtype and device of its caches, which
modules attend, what is hooked, the vocabulary, and in graphs the weights' addresses.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from attention.hf.gate import gate_of
from attention.hf.weights import address_of
from specdec.errors import ModelChangedError
from specdec.target.settings import Held, Settings
from specdec.target.unseen import hook_ids, hook_tables, unseen_state
from specdec.values import short

_AGAIN = "; wrap it again with SpeculativeModel.from_pretrained(model, …)"
_EQUAL_ATTENTION = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
"""transformers' own attention functions: they differ by rounding."""
_OR_AGAIN = ", or wrap it again with SpeculativeModel.from_pretrained(model, …)"


def part_in_training(model: nn.Module) -> str | None:
    """Name of a part of the model in training mode, where dropout changes the output; None when there is none.

    Linear layers are the same in both modes and are made in training mode, ours among them.
    """
    named = ((name, m) for name, m in model.named_modules() if m.training and not isinstance(m, nn.Linear))
    return next((name or type(m).__name__ for name, m in named), None)


@dataclass(frozen=True)
class AdapterState:
    """What decides how one of peft's layers computes beside its weights.

    Attributes:
        active: names of the adapters in use; merged: those that are in the weights. disabled: none is used.
        scaling: (name, factor) of each adapter.
    """

    active: tuple[str, ...]
    merged: tuple[str, ...]
    disabled: bool
    scaling: tuple[tuple[str, Any], ...]


def adapter_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """The layers that peft has put into a model (its tuner layers, and modules saved with an adapter)."""
    # By what they have, without importing peft; a PreTrainedModel has a method of that name.
    return tuple(m for m in model.modules() if isinstance(getattr(type(m), "disable_adapters", None), property))


def adapter_states(layers: tuple[nn.Module, ...]) -> tuple[AdapterState, ...]:
    """How they compute now."""
    return tuple(_adapter_state(layer) for layer in layers)


def _adapter_state(layer: Any) -> AdapterState:
    scaling = getattr(layer, "scaling", None)
    return AdapterState(
        tuple(layer.active_adapters),
        tuple(getattr(layer, "merged_adapters", ())),
        bool(layer.disable_adapters),
        tuple(scaling.items()) if isinstance(scaling, dict) else (),
    )


def in_words(states: tuple[AdapterState, ...]) -> str:
    """The adapters in use, for messages; "" for a model without."""
    disabled = any(state.disabled for state in states)
    names = dict.fromkeys(name for state in states for name in state.active)
    merged = dict.fromkeys(name for state in states for name in state.merged)
    text = "disabled" if disabled else ", ".join(names)
    return f"{text} (merged: {', '.join(merged)})" if merged else text


@dataclass(frozen=True)
class _Snapshot:
    """What is quick to compare of a model: of every module its mode and children, of all parameters in order identity,
    dtype, device and, where graphs hold them, address; None or 0 where a module has no parameter of that name.

    A call compares some thousand things, so they are collected by kind, not by module.
    """

    modules: tuple[nn.Module, ...]
    training: list[bool]
    children: list[tuple[nn.Module | None, ...]]
    parameters: list[int]
    kinds: list[tuple[torch.dtype, torch.device] | None]
    addresses: list[int] | None

    @classmethod
    def of(cls, modules: tuple[nn.Module, ...], captured: bool) -> _Snapshot:
        """These modules as they are now; `captured`: whether graphs hold their parameters."""
        owned = [p for m in modules for p in m._parameters.values()]
        return cls(
            modules,
            [m.training for m in modules],
            [tuple(m._modules.values()) for m in modules],
            list(map(id, owned)),
            [None if p is None else (p.dtype, p.device) for p in owned],
            [0 if p is None else address_of(p) for p in owned] if captured else None,
        )

    @property
    def is_right(self) -> bool:
        """Whether all is as it was."""
        return _Snapshot.of(self.modules, self.addresses is not None) == self


@dataclass(frozen=True)
class LiveModel:
    """The wrapped model and what it was at loading.

    Attributes:
        model: the user's.
        parts: of every module what must stay; kinds: dtypes and devices of its parameters; vocabulary: rows of its
            input and output embeddings; addresses: of its parameters, () where no graph holds them.
        snapshot: to see quickly that nothing has changed.
        adapted: layers of peft in it, () for most models; adapters: how they computed.
        settings: what its modules compute with beside weights and is not read again: with graphs all of it.
        attention: the name of its attention function.
        hook_tables, hooks: of its modules, where graphs would ignore others; none without graphs.
        held: the parameters that `addresses` are of. One that is replaced in the model lives on for the graphs.
        buffers: that graphs hold: the dict that each is in, its name there, and the tensor.
    """

    model: PreTrainedModel
    parts: tuple[object, ...]
    kinds: frozenset[tuple[torch.dtype, torch.device]]
    vocabulary: tuple[int, ...]
    addresses: tuple[int, ...]
    snapshot: _Snapshot
    adapted: tuple[nn.Module, ...]
    adapters: tuple[AdapterState, ...]
    settings: Settings
    attention: str | None
    hook_tables: tuple[dict[int, Any], ...]
    hooks: list[int]
    held: tuple[nn.Parameter, ...]
    buffers: tuple[tuple[str, dict[str, torch.Tensor | None], str, torch.Tensor], ...]

    @classmethod
    def of(cls, model: PreTrainedModel, captured: bool, settings: Settings | None = None) -> LiveModel:
        """The model as it is now.

        Args:
            captured: whether graphs hold its weights.
            settings: of the model; default as they are, those that forwards change themselves among them.
        """
        addresses = _addresses(model) if captured else ()
        snapshot = _Snapshot.of(tuple(model.modules()), captured)
        adapted, found = adapter_layers(model), settings or Settings.of(model)
        tables = hook_tables(snapshot.modules) if captured else ()
        return cls(
            *(model, _parts(model), _kinds(model), _vocabulary(model), addresses, snapshot),
            *(adapted, adapter_states(adapted), found if captured else found.read_at_loading()),
            *(model.config._attn_implementation, tables, hook_ids(tables)),
            tuple(model.parameters()) if captured else (),
            tuple(_buffers(model)) if captured else (),
        )

    def begin_check(self) -> Callable[[], None] | None:
        """What of `check` must come before a round; what is left of it, which may run while the device does.

        Rounds from graphs call no module of the model: all they need is that its weights lie where they lay, which is
        soon seen. The rest only decides whether a call is refused. None: no graph holds the weights, all was checked.

        Raises:
            ModelChangedError: see `check`.
        """
        if not self.held:
            self.check()
            return None
        plain = set(map(type, self.held)) == {nn.Parameter}
        if tuple(map(torch.Tensor.data_ptr if plain else address_of, self.held)) != self.addresses:
            self.check()
        return self.check

    def check(self) -> None:
        """Refuse a model that was changed since. Runs at every call, so a model in which nothing moved is seen first.

        Raises:
            ModelChangedError: what has changed, and what to do.
        """
        with gate_of(self.model.config).held():  # forwards of ours change some settings while they run
            self._check()

    def _check(self) -> None:
        self._check_adapters()
        if self.snapshot.is_right and _vocabulary(self.model) == self.vocabulary:
            self._check_settings()
            return
        self._check_mode()
        kinds = _kinds(self.model)
        if kinds != self.kinds:
            raise ModelChangedError(
                f"the model's parameters were {_words(self.kinds)} when it was wrapped and are {_words(kinds)} now, "
                f"while its caches are what they were; move it back, or{_AGAIN.removeprefix(';')}"
            )
        vocabulary = _vocabulary(self.model)
        if vocabulary != self.vocabulary:
            raise ModelChangedError(
                f"the model's embeddings had {self.vocabulary} rows when it was wrapped and have {vocabulary} now"
                + _AGAIN
            )
        if _parts(self.model) != self.parts:
            raise ModelChangedError(
                f"modules of the model were added, removed or replaced since it was wrapped (an adapter?){_AGAIN}"
            )
        if self.addresses and _addresses(self.model) != self.addresses:
            raise ModelChangedError(
                "the model's weights lie in other memory than when its graphs were captured (was it moved, or loaded "
                f"with assign=True?){_AGAIN}; new values in place are fine"
            )
        self._check_settings()

    def _check_settings(self) -> None:
        """What was read at loading, and is not read again; in graphs that is everything."""
        function = self.model.config._attn_implementation
        if function != self.attention and function not in _EQUAL_ATTENTION:
            raise ModelChangedError(
                f"the model's attention function was {self.attention!r} when it was wrapped and is {function!r} now, "
                f"which rounds do not call; set it back{_OR_AGAIN}"
            )
        change = self.settings.change()
        if change is not None and isinstance(change.before, Held):
            raise ModelChangedError(
                f"{change.name} is another object or was written to since the model was wrapped{_AGAIN}"
            )
        if change is not None:
            raise ModelChangedError(
                f"{change.name} was {short(change.before)} when the model was wrapped and is {short(change.now)} now; "
                "set it back" + _OR_AGAIN
            )
        if self.held:
            self._check_captured()

    def _check_captured(self) -> None:
        """What replayed graphs would ignore: hooks, forwards in place of others, buffers that were replaced."""
        for name, owner, key, before in self.buffers:
            now = owner.get(key)
            if now is not before and (now is None or not _equal_buffers(before, now)):
                raise ModelChangedError(f"the buffer {name} was replaced since graphs were captured{_AGAIN}")
        found = self.settings.hidden()
        if hook_ids(self.hook_tables) != self.hooks:
            found = found or unseen_state(self.model)
        if found:
            raise ModelChangedError(
                f"{found} is new since graphs were captured, which do not call it; remove it{_OR_AGAIN}, which runs "
                "without graphs then"
            )

    def _check_adapters(self) -> None:
        """Adapters switched, scaled, merged, disabled: the same parameters, and another model."""
        now = adapter_states(self.adapted)
        if now != self.adapters:
            before, after = in_words(self.adapters), in_words(now)
            found = f"{before} when it was wrapped and are {after} now" if before != after else f"{before}, scaled anew"
            raise ModelChangedError(f"the adapters of the model were {found}; switch them back{_OR_AGAIN}")

    def _check_mode(self) -> None:
        part = part_in_training(self.model)
        if part is not None:
            raise ModelChangedError(
                f"{part} is in training mode since the model was wrapped, where dropout changes its output; call "
                "model.eval()"
            )


class WeightVersions:
    """Whether a model has changed since the last look: other values in place, as far as torch counts that, and, but
    for graphs, other tensors in their place, other settings and other hooks.

    It counts what is written to a parameter (`load_state_dict`, an optimiser's step, an adapter merged in place), and
    not what is written through `.data`, `.detach()` or `.numpy()`: `SpeculativeModel.refresh()` is for those. For
    inference tensors it counts nothing. Another tensor is one that was assigned (`layer.weight = …`, `weight.data = …`,
    `load_state_dict(assign=True)`, another linear layer of the same sizes): rounds without graphs read it from then
    on. They call modules and run hooks, so other settings (`specdec.target.settings`), other hooks and a forward set on
    a module count as other weights.

    Attributes:
        unseen: the first hook, parametrization or forward of the target whose state nobody can see, in words; "" where
            there is none, and with graphs, which are not captured over such.
    """

    def __init__(self, *parts: object, captured: bool = False, settings: Settings | None = None) -> None:
        """
        Args:
            parts: modules, the target first; anything else has no weights.
            captured: graphs read the tensors that are there now, whatever is assigned in their place, so only their
                values are looked at.
            settings: of these modules; default as they are, those that forwards change themselves among them.
        """
        self._roots = tuple(part for part in parts if isinstance(part, nn.Module))
        self._captured = captured
        self._settings = settings or Settings.of(*self._roots)
        self._walk()
        self._look()
        self.unseen = "" if captured else unseen_state(self._roots[0])
        self._counted = [tensor for tensor in self._tensors if not tensor.is_inference()]
        self._count = sum(tensor._version for tensor in self._counted)

    def changed(self) -> bool:
        """Whether any has since this was asked last."""
        return self._counted_on() if self._captured else self._looks_different()

    def _counted_on(self) -> bool:
        """Of the same tensors: a first token waits for this."""
        before, self._count = self._count, sum(tensor._version for tensor in self._counted)
        return before != self._count

    def _looks_different(self) -> bool:
        before, versions, hooks, addresses = self._tensors, self._versions, self._hooks, self._addresses
        same = self._settings.are_same
        if self._children != self._children_now():
            self._walk()
            same = False
        self._look()
        if not same or hooks != self._hooks:
            self._settings = self._settings.renewed()
            self.unseen = unseen_state(self._roots[0])
            return True
        if len(before) != len(self._tensors):
            return True
        if (
            addresses == self._addresses
            and versions == self._versions
            and all(map(operator.is_, before, self._tensors))
        ):
            return False
        old = zip(before, versions, addresses, strict=True)
        new = zip(self._tensors, self._versions, self._addresses, strict=True)
        return not all(
            (was[0] is now[0] and was[1:] == now[1:]) or _equal_buffers(was[0], now[0])
            for was, now in zip(old, new, strict=True)
        )

    def _walk(self) -> None:
        self._modules = [module for root in self._roots for module in root.modules()]
        self._children = self._children_now()
        self._hook_tables = hook_tables(self._modules)
        self._owners: list[Any] = [d for module in self._modules for d in (module._parameters, module._buffers)]

    def _children_now(self) -> list[nn.Module | None]:
        return [child for module in self._modules for child in module._modules.values()]

    def _look(self) -> None:
        self._tensors = [tensor for owner in self._owners for tensor in owner.values() if tensor is not None]
        self._versions = _counts(self._tensors)
        plain = {torch.Tensor, nn.Parameter}.issuperset(map(type, self._tensors))
        self._addresses = list(map(torch.Tensor.data_ptr if plain else address_of, self._tensors))
        self._hooks = hook_ids(self._hook_tables)


def _counts(tensors: list[torch.Tensor]) -> list[int]:
    """torch's counts of writes to them; 0 for inference tensors, which have none."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _buffers(model: nn.Module) -> Iterator[tuple[str, dict[str, torch.Tensor | None], str, torch.Tensor]]:
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{name}.{key}".removeprefix("."), module._buffers, key, buffer


def _equal_buffers(before: torch.Tensor, now: torch.Tensor) -> bool:
    """Whether another buffer has the same values: some forwards make their rotary one anew."""
    if before is now or isinstance(before, nn.Parameter) or isinstance(now, nn.Parameter):
        return False
    return before.device == now.device and before.dtype == now.dtype and torch.equal(before, now)


def _parts(model: nn.Module) -> tuple[object, ...]:
    """Plain linear layers by their sizes (one may replace another: the engine holds none), others by identity."""
    return tuple((m.in_features, m.out_features) if isinstance(m, nn.Linear) else id(m) for m in model.modules())


def _kinds(model: nn.Module) -> frozenset[tuple[torch.dtype, torch.device]]:
    return frozenset((p.dtype, p.device) for p in model.parameters())


def _vocabulary(model: PreTrainedModel) -> tuple[int, ...]:
    embeddings: tuple[Any, ...] = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = (getattr(e, "weight", None) for e in embeddings)
    return tuple(len(w) for w in weights if w is not None)


def _addresses(model: nn.Module) -> tuple[int, ...]:
    return tuple(address_of(p) for p in model.parameters())


def _words(kinds: frozenset[tuple[torch.dtype, torch.device]]) -> str:
    return ", ".join(sorted(f"{str(dtype).removeprefix('torch.')} on {device}" for dtype, device in kinds))
