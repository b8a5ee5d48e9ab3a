"""Changes of a wrapped model: weights, settings and hooks that are others than at loading, or than at the last look.

The engine runs the user's own model, so new values in place (`load_state_dict`, an optimiser's step) count from the
next round on, in captured graphs too: `WeightVersions` notices them, because cached results of earlier rounds are then
stale. Properties that the engine read at loading may not change, and `LiveModel` refuses a model whose do: dtype and
device (for its caches), attention modules, hooked modules, the vocabulary, and in graphs the weights' addresses.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.backends.limits import dtype_name
from attention.hf.gate import gate_of
from attention.hf.port import ATTENTION_NAME
from attention.hf.weights import address_of
from specdec.errors import ModelChangedError
from specdec.requests.submission import Check
from specdec.values import short
from specdec.wrapped.alterations import HookTables, hook_ids, hook_tables, new_hook, unseen_state
from specdec.wrapped.settings import Held, Settings

_AGAIN = "; wrap it again with SpeculativeModel.from_pretrained(model, …)"
_EQUAL_ATTENTION = (
    *(None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
    ATTENTION_NAME,
)
"""transformers' own attention functions: they differ by rounding. specdec's is named for a moment longer where an
interrupt strikes while a forward puts the user's back."""
_MOVING_FREQUENCIES = ("dynamic", "longrope")
_OR_AGAIN = ", or wrap it again with SpeculativeModel.from_pretrained(model, …)"

Modules = tuple[nn.Module, ...]


class AdapterState(NamedTuple):
    """The state of a peft layer, apart from its weights, that decides its output.

    Attributes:
        active: names of the adapters in use; merged: adapters merged into the weights. disabled: none is used.
        scaling: (name, factor) of each adapter.
    """

    active: tuple[str, ...]
    merged: tuple[str, ...]
    disabled: bool
    scaling: tuple[tuple[str, Any], ...]


def adapter_layers(model: nn.Module) -> Modules:
    """The layers that peft has put into a model (its tuner layers, and modules saved with an adapter)."""
    # By what they have, without importing peft; a PreTrainedModel has a method of that name.
    return tuple(m for m in model.modules() if isinstance(getattr(type(m), "disable_adapters", None), property))


def adapter_states(layers: tuple[Any, ...]) -> tuple[AdapterState, ...]:
    """How they compute now."""
    found = []
    for layer in layers:
        scaling = getattr(layer, "scaling", None)
        factors = tuple(scaling.items()) if isinstance(scaling, dict) else ()
        merged = tuple(getattr(layer, "merged_adapters", ()))
        found.append(AdapterState(tuple(layer.active_adapters), merged, bool(layer.disable_adapters), factors))
    return tuple(found)


def in_words(states: tuple[AdapterState, ...]) -> str:
    """The adapters in use, for messages; "" for a model without."""
    disabled = any(state.disabled for state in states)
    names = dict.fromkeys(name for state in states for name in state.active)
    merged = dict.fromkeys(name for state in states for name in state.merged)
    text = "disabled" if disabled else ", ".join(names)
    return f"{text} (merged: {', '.join(merged)})" if merged else text


@dataclass(frozen=True)
class _Snapshot:
    """The state of a model that is quick to compare: of every module its children, of all parameters in order
    dtype, device and, where graphs hold them, address.

    A call compares some thousand things, so they are collected by kind, not by module.
    held: the parameters that `addresses` are of. One that is replaced in the model lives on for the graphs.
    """

    modules: Modules
    children: list[nn.Module | None]
    kinds: list[tuple[torch.dtype, torch.device]]
    addresses: list[int]
    held: list[nn.Parameter] = field(compare=False)

    @classmethod
    def of(cls, modules: Modules, captured: bool) -> _Snapshot:
        """These modules as they are now; `captured`: whether graphs hold their parameters."""
        there = [p for m in modules if m._parameters for p in m._parameters.values() if p is not None]
        held = there if captured else []
        return cls(modules, _children(modules), [(p.dtype, p.device) for p in there], addresses_of(held), held)


class _Buffer(NamedTuple):
    """A buffer that rounds do not read again: its dict and key. writes: torch's count of writes to it, where new values
    in place are not read either."""

    name: str
    held_by: dict[str, Tensor | None]
    key: str
    tensor: Tensor
    writes: int | None

    @property
    def is_same(self) -> bool:
        now = self.held_by.get(self.key)
        if now is self.tensor:
            return self.writes is None or writes_to([now])[0] == self.writes
        return now is not None and equal_buffers(self.tensor, now)


@dataclass(frozen=True)
class LiveModel:
    """The user's model, wrapped, with its state at loading.

    Attributes:
        snapshot: shows quickly that nothing has changed. vocabulary: rows of its input and output embeddings.
        adapted: layers of peft in it, () for most models; adapters: how they computed.
        settings: values besides weights that its modules compute with and that are not read again (with graphs: all).
        attention: the name of its attention function.
        uncalled: modules that rounds do not call; with graphs all modules. hook_tables, hooks: the hooks of these.
        buffers: buffers that rounds do not read again.
    """

    model: PreTrainedModel
    snapshot: _Snapshot
    vocabulary: tuple[int, ...]
    adapted: Modules
    adapters: tuple[AdapterState, ...]
    settings: Settings
    attention: str | None
    uncalled: Modules
    hook_tables: HookTables
    hooks: list[int]
    buffers: tuple[_Buffer, ...]

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        captured: bool,
        settings: Settings | None = None,
        uncalled: Modules = (),
        tabulated: Modules = (),
    ) -> LiveModel:
        """The model as it is now. captured: whether graphs hold its weights. uncalled, tabulated: see `Target`.

        settings: the model's settings; default: the current ones, including those that forwards change themselves.
        """
        snapshot = _Snapshot.of(tuple(model.modules()), captured)
        adapted = adapter_layers(model)
        found = settings or Settings.of(model)
        uncalled = snapshot.modules if captured else uncalled
        tables = hook_tables(uncalled) if uncalled else ()
        buffers = (*_buffers(uncalled if captured else (), False), *_buffers(tabulated, True))
        return cls(
            *(model, snapshot, _vocabulary(model), adapted, adapter_states(adapted)),
            *(found if captured else found.renewed(built_in_only=True), model.config._attn_implementation),
            uncalled,
            tables,
            hook_ids(tables),
            buffers,
        )

    def begin_check(self) -> Check:
        """Do the part of `check` that must precede a round; returns the rest, which may run while the device does.

        Rounds from graphs call no module of the model: they only need its weights at the same addresses, which is quick
        to check. The rest only decides whether a call is refused. None: no graph holds the weights, all was checked.

        Raises:
            ModelChangedError: see `check`.
        """
        held = self.snapshot.held
        if not held or addresses_of(held) != self.snapshot.addresses:
            self.check()
        return self.check if held else None

    def check(self) -> None:
        """Refuse a model that was changed since. Runs at every call, so a model in which nothing moved is seen first.

        Raises:
            ModelChangedError: the model has changed; the message names the change and a remedy.
        """
        with gate_of(self.model.config).held():  # specdec forwards change some settings while they run
            change = next(self._changes(), None)
        if change is not None:
            raise ModelChangedError(change)

    def _changes(self) -> Iterator[str]:
        """What has changed and a remedy, in words."""
        now = adapter_states(self.adapted)
        if now != self.adapters:
            before = in_words(self.adapters)
            after = in_words(now)
            found = f"{before} when it was wrapped and are {after} now" if before != after else f"{before}, scaled anew"
            yield f"the adapters of the model were {found}; switch them back{_OR_AGAIN}"
        captured = bool(self.snapshot.held)
        vocabulary = _vocabulary(self.model)
        if _Snapshot.of(self.snapshot.modules, captured) != self.snapshot or vocabulary != self.vocabulary:
            yield from self._changes_of_weights(captured, vocabulary)
        yield from self._changes_of_settings()
        for buffer in self.buffers:
            if not buffer.is_same:
                yield (
                    f"the buffer {buffer.name} is another since the model was wrapped (by model.to(dtype)? cast "
                    f"it before){_AGAIN}"
                )
        own = (f"the forward of a {type(m).__name__}" for m in self.uncalled if "forward" in m.__dict__)
        hidden = self.settings.hidden() if captured else next(own, "")
        if hook_ids(self.hook_tables) != self.hooks:
            hidden = hidden or new_hook(self.model, self.uncalled, self.hooks)
        if hidden:
            yield (
                f"{hidden} is new since the model was wrapped, and {'graphs' if captured else 'rounds'} do not call "
                f"it; remove it{_OR_AGAIN}"
            )

    def _changes_of_weights(self, captured: bool, vocabulary: tuple[int, ...]) -> Iterator[str]:
        before = self.snapshot
        now = _Snapshot.of(tuple(self.model.modules()), captured)
        if set(before.kinds) != set(now.kinds):
            yield (
                f"the model's parameters were {_words(before)} when it was wrapped and are {_words(now)} now, "
                f"while its caches are what they were; move it back{_OR_AGAIN}"
            )
        if vocabulary != self.vocabulary:
            yield (
                f"the model's embeddings had {self.vocabulary} rows when it was wrapped and have {vocabulary} now"
                + _AGAIN
            )
        if _parts(before) != _parts(now):
            yield f"modules of the model were added, removed or replaced since it was wrapped (an adapter?){_AGAIN}"
        if before.addresses != now.addresses:
            yield (
                "the model's weights lie in other memory than when its graphs were captured (was it moved, or loaded "
                f"with assign=True?){_AGAIN}; new values in place are fine"
            )

    def _changes_of_settings(self) -> Iterator[str]:
        """Values that were read at loading and are not read again; with graphs that is everything."""
        function = self.model.config._attn_implementation
        if function != self.attention and function not in _EQUAL_ATTENTION:
            yield (
                f"the model's attention function was {self.attention!r} when it was wrapped and is {function!r} now, "
                f"which rounds do not call; set it back{_OR_AGAIN}"
            )
        change = self.settings.change()
        if change is not None and isinstance(change.before, Held):
            yield f"{change.name} is another object or was written to since the model was wrapped{_AGAIN}"
        elif change is not None:
            yield (
                f"{change.name} was {short(change.before)} when the model was wrapped and is {short(change.now)} now; "
                f"set it back{_OR_AGAIN}"
            )


def _buffers(modules: Iterable[nn.Module], read_once: bool) -> Iterator[_Buffer]:
    """read_once: new values in place are not read either."""
    for module in modules:
        moving = getattr(module, "rope_type", "") in _MOVING_FREQUENCIES  # recomputed for the length of each forward
        for key, buffer in module._buffers.items():
            if buffer is not None and not (moving and key == "inv_freq"):
                count = writes_to([buffer])[0] if read_once else None
                yield _Buffer(f"{type(module).__name__}.{key}", module._buffers, key, buffer, count)


def _children(modules: Iterable[nn.Module]) -> list[nn.Module | None]:
    return [child for module in modules if module._modules for child in module._modules.values()]


def _parts(snapshot: _Snapshot) -> list[object]:
    """Plain linear layers by their sizes (one may replace another: the engine holds none), others by identity."""
    return [(m.in_features, m.out_features) if isinstance(m, nn.Linear) else id(m) for m in snapshot.modules]


def _vocabulary(model: PreTrainedModel) -> tuple[int, ...]:
    embeddings: tuple[Any, ...] = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = (getattr(e, "weight", None) for e in embeddings)
    return tuple(len(w) for w in weights if w is not None)


def _words(snapshot: _Snapshot) -> str:
    return ", ".join(sorted({f"{dtype_name(dtype)} on {device}" for dtype, device in snapshot.kinds}))


class WeightVersions:
    """Whether a model has changed since the last look: other values in place, as far as torch counts that, and, but
    for graphs, other tensors in their place, other settings and other hooks.

    It counts writes to a parameter (`load_state_dict`, an optimiser's step, an adapter merged in place), but not writes
    through `.data`, `.detach()` or `.numpy()`, for which `SpeculativeModel.refresh()` exists. For inference tensors it
    counts nothing. Another tensor is one that was assigned (`layer.weight = …`, `weight.data = …`,
    `load_state_dict(assign=True)`, another linear layer of the same sizes): rounds without graphs read it from then on.
    They call modules and run hooks, so other settings (`specdec.wrapped.settings`), other hooks and a forward set on a
    module count as other weights.

    Attributes:
        unseen: a description of the target's first hook, parametrization or forward that may read state that specdec
            cannot track; "" if it has none, and with graphs, which are not captured in that case.
    """

    def __init__(self, *parts: object, captured: bool = False, settings: Settings | None = None) -> None:
        """parts: modules, the target first; anything else has no weights. settings: their settings; default: the
        current ones.

        captured: graphs read the tensors that are there now, whatever is assigned in their place: only values count.
        """
        self._roots = tuple(part for part in parts if isinstance(part, nn.Module))
        self._captured = captured
        self._settings = settings or Settings.of(*self._roots)
        self._walk()
        self._look()
        self.unseen = "" if captured else unseen_state(self._roots[0])
        self._count = sum(self._versions)

    def changed(self) -> bool:
        """Whether anything has changed since the last call."""
        if not self._captured:
            return self._looks_different()
        before = self._count
        self._count = sum(writes_to(self._tensors))  # only a sum: the first token waits for this
        return before != self._count

    def _looks_different(self) -> bool:
        before = self._tensors
        versions = self._versions
        hooks = self._hooks
        addresses = self._addresses
        same = self._settings.are_same
        if self._children != _children(self._modules):
            self._walk()
            same = False
        self._look()
        if not same or hooks != self._hooks:
            self._settings = self._settings.renewed()
            self.unseen = unseen_state(self._roots[0])
            return True
        if len(before) != len(self._tensors):
            return True
        counted = addresses == self._addresses and versions == self._versions
        if counted and all(map(operator.is_, before, self._tensors)):
            return False
        old = zip(before, versions, addresses, strict=True)
        new = zip(self._tensors, self._versions, self._addresses, strict=True)
        return not all(
            (was[0] is now[0] and was[1:] == now[1:]) or equal_buffers(was[0], now[0])
            for was, now in zip(old, new, strict=True)
        )

    def _walk(self) -> None:
        self._modules = [module for root in self._roots for module in root.modules()]
        self._children = _children(self._modules)
        self._hook_tables = hook_tables(self._modules)
        self._owners: list[Any] = [d for module in self._modules for d in (module._parameters, module._buffers)]

    def _look(self) -> None:
        self._tensors = [tensor for owner in self._owners for tensor in owner.values() if tensor is not None]
        self._versions = writes_to(self._tensors)
        self._addresses = addresses_of(self._tensors)
        self._hooks = hook_ids(self._hook_tables)


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """Where their values begin."""
    plain = {Tensor, nn.Parameter}.issuperset(map(type, tensors))
    return list(map(Tensor.data_ptr if plain else address_of, tensors))


def writes_to(tensors: list[Tensor]) -> list[int]:
    """torch's counts of writes to them; 0 for inference tensors, which have none."""
    try:
        return [tensor._version for tensor in tensors]  # torch's count of in-place writes has no public name
    except RuntimeError:  # of an inference tensor, which has no count
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def equal_buffers(before: Tensor, now: Tensor) -> bool:
    """Whether another buffer has the same values: some forwards recreate their rotary buffer."""
    if before is now or isinstance(before, nn.Parameter) or isinstance(now, nn.Parameter):
        return False
    return before.device == now.device and before.dtype == now.dtype and torch.equal(before, now)
