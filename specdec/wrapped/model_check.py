"""Check that a wrapped model still matches the engine: weights, settings, hooks.

The engine runs the user's own model, so new values in place (`load_state_dict`, an optimiser's step) count from the
next round on, in captured graphs too. Properties that the engine read at loading may not change: dtype and device (for
its caches), attention modules, hooked modules, the vocabulary, and in graphs the weights' addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from attention.hf.gate import gate_of
from attention.hf.port import ATTENTION_NAME
from specdec.errors import ModelChangedError
from specdec.values import short
from specdec.wrapped.settings import Held, Settings
from specdec.wrapped.versions import addresses_of, equal_buffers, hook_ids, hook_tables, new_hook, writes_to

_AGAIN = "; wrap it again with SpeculativeModel.from_pretrained(model, …)"
_EQUAL_ATTENTION = (
    *(None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"),
    ATTENTION_NAME,
)
"""transformers' own attention functions: they differ by rounding. specdec's is named for a moment longer where an
interrupt strikes while a forward puts the user's back."""
_SAME_IN_TRAINING = (nn.Linear, nn.ModuleList, nn.ModuleDict)
_MOVING_FREQUENCIES = ("dynamic", "longrope")
_OR_AGAIN = ", or wrap it again with SpeculativeModel.from_pretrained(model, …)"


def part_in_training(model: nn.Module) -> str | None:
    """Name of a part of the model in training mode, where dropout changes the output, or None.

    Linear layers and containers, which are made in training mode and are the same in both, do not count.
    """
    named = ((name, m) for name, m in model.named_modules() if m.training and not isinstance(m, _SAME_IN_TRAINING))
    return next((name or type(m).__name__ for name, m in named), None)


@dataclass(frozen=True)
class AdapterState:
    """The state of a peft layer, apart from its weights, that decides its output.

    Attributes:
        active: names of the adapters in use; merged: adapters merged into the weights. disabled: none is used.
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
    """The state of a model that is quick to compare: of every module its children, of all parameters in order
    identity, dtype, device and, where graphs hold them, address.

    A call compares some thousand things, so they are collected by kind, not by module.
    """

    modules: tuple[nn.Module, ...]
    children: list[tuple[nn.Module | None, ...]]
    parameters: list[int]
    kinds: list[tuple[torch.dtype, torch.device]]
    addresses: list[int] | None

    @classmethod
    def of(cls, modules: tuple[nn.Module, ...], captured: bool) -> _Snapshot:
        """These modules as they are now; `captured`: whether graphs hold their parameters."""
        owned = [p for m in modules if m._parameters for p in m._parameters.values()]
        there = [p for p in owned if p is not None]
        return cls(
            modules,
            [tuple(m._modules.values()) for m in modules if m._modules],
            list(map(id, owned)),
            [(p.dtype, p.device) for p in there],
            addresses_of(there) if captured else None,
        )

    @property
    def is_right(self) -> bool:
        """Whether all is as it was."""
        return _Snapshot.of(self.modules, self.addresses is not None) == self


class _Buffer(NamedTuple):
    """A buffer that rounds do not read again: its dict and key. writes: torch's count of writes to it, where new values
    in place are not read either."""

    name: str
    held_by: dict[str, torch.Tensor | None]
    key: str
    tensor: torch.Tensor
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
        parts: the fixed properties of every module; kinds: dtypes and devices of its parameters; vocabulary: rows of
            its input and output embeddings; addresses: its parameters' addresses, () if no graph holds them.
        snapshot: shows quickly that nothing has changed. attention: the name of its attention function.
        adapted: layers of peft in it, () for most models; adapters: how they computed.
        settings: values besides weights that its modules compute with and that are not read again (with graphs: all).
        uncalled: modules that rounds do not call; with graphs all modules. hook_tables, hooks: the hooks of these.
        held: the parameters that `addresses` are of. One that is replaced in the model lives on for the graphs.
        buffers: buffers that rounds do not read again.
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
    uncalled: tuple[nn.Module, ...]
    hook_tables: tuple[dict[int, Any], ...]
    hooks: list[int]
    held: tuple[nn.Parameter, ...]
    buffers: tuple[_Buffer, ...]

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        captured: bool,
        settings: Settings | None = None,
        uncalled: tuple[nn.Module, ...] = (),
        tabulated: tuple[nn.Module, ...] = (),
    ) -> LiveModel:
        """The model as it is now. captured: whether graphs hold its weights. uncalled, tabulated: see `Target`.

        settings: the model's settings; default: the current ones, including those that forwards change themselves.
        """
        addresses = _addresses(model) if captured else ()
        snapshot = _Snapshot.of(tuple(model.modules()), captured)
        adapted, found = adapter_layers(model), settings or Settings.of(model)
        uncalled = snapshot.modules if captured else uncalled
        tables = hook_tables(uncalled) if uncalled else ()
        return cls(
            *(model, _parts(model), _kinds(model), _vocabulary(model), addresses, snapshot),
            *(adapted, adapter_states(adapted), found if captured else found.read_at_loading()),
            model.config._attn_implementation,
            *(uncalled, tables, hook_ids(tables)),
            tuple(model.parameters()) if captured else (),
            (*_buffers(snapshot.modules if captured else (), False), *_buffers(tabulated, True)),
        )

    def begin_check(self) -> Callable[[], None] | None:
        """Do the part of `check` that must precede a round; returns the rest, which may run while the device does.

        Rounds from graphs call no module of the model: they only need its weights at the same addresses, which is quick
        to check. The rest only decides whether a call is refused. None: no graph holds the weights, all was checked.

        Raises:
            ModelChangedError: see `check`.
        """
        if not self.held:
            self.check()
            return None
        if tuple(addresses_of(self.held)) != self.addresses:
            self.check()
        return self.check

    def check(self) -> None:
        """Refuse a model that was changed since. Runs at every call, so a model in which nothing moved is seen first.

        Raises:
            ModelChangedError: the model has changed; the message names the change and a remedy.
        """
        with gate_of(self.model.config).held():  # specdec forwards change some settings while they run
            self._check()

    def _check(self) -> None:
        self._check_adapters()
        if self.snapshot.is_right and _vocabulary(self.model) == self.vocabulary:
            self._check_settings()
            return
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
        """Values that were read at loading and are not read again; with graphs that is everything."""
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
        self._check_ignored()

    def _check_ignored(self) -> None:
        """Changes that rounds would ignore: hooks and forwards of modules that they do not call, replaced buffers."""
        for buffer in self.buffers:
            if not buffer.is_same:
                raise ModelChangedError(
                    f"the buffer {buffer.name} is another since the model was wrapped (by model.to(dtype)? cast "
                    f"it before){_AGAIN}"
                )
        found = self.settings.hidden() if self.held else _with_own_forward(self.uncalled)
        if hook_ids(self.hook_tables) != self.hooks:
            found = found or new_hook(self.model, self.uncalled, self.hooks)
        if found:
            raise ModelChangedError(
                f"{found} is new since the model was wrapped, and {'graphs' if self.held else 'rounds'} do not call "
                f"it; remove it{_OR_AGAIN}"
            )

    def _check_adapters(self) -> None:
        """Adapters switched, scaled, merged, disabled: the same parameters, and another model."""
        now = adapter_states(self.adapted)
        if now != self.adapters:
            before, after = in_words(self.adapters), in_words(now)
            found = f"{before} when it was wrapped and are {after} now" if before != after else f"{before}, scaled anew"
            raise ModelChangedError(f"the adapters of the model were {found}; switch them back{_OR_AGAIN}")


def _buffers(modules: Iterable[nn.Module], read_once: bool) -> Iterator[_Buffer]:
    """read_once: new values in place are not read either."""
    for module in modules:
        moving = getattr(module, "rope_type", "") in _MOVING_FREQUENCIES  # recomputed for the length of each forward
        for key, buffer in module._buffers.items():
            if buffer is not None and not (moving and key == "inv_freq"):
                count = writes_to([buffer])[0] if read_once else None
                yield _Buffer(f"{type(module).__name__}.{key}", module._buffers, key, buffer, count)


def _with_own_forward(modules: Iterable[nn.Module]) -> str:
    owner = next((module for module in modules if "forward" in module.__dict__), None)
    return "" if owner is None else f"the forward of a {type(owner).__name__}"


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
    return tuple(addresses_of(list(model.parameters())))


def _words(kinds: frozenset[tuple[torch.dtype, torch.device]]) -> str:
    return ", ".join(sorted(f"{str(dtype).removeprefix('torch.')} on {device}" for dtype, device in kinds))
