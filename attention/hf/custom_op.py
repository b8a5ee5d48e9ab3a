"""Attention as an opaque operator: torch.compile sees no graph breaks. Recurrences: `attention.recurrence.hf_calls`.

The operator finds its attention through a numbered channel, whose content may change from call to call without making
the compiled code stale. The compiler does not see that the operator writes the KV cache, which is safe because no other
operator of a compiled model touches the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from attention.errors import UnsupportedAttentionError

LayerAttend = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(layer, query [T, Hq, Dk], key [T, Hkv, Dk], value [T, Hkv, Dv], sinks [Hq] or None) -> [T, Hq, Dv]."""

Function = Callable[..., Any]
_numbers = count()
# Weak: compiled code holds only a channel's number, so that it keeps no engine alive.
_channels: WeakValueDictionary[int, Channel[Any]] = WeakValueDictionary()
Served = TypeVar("Served")


class Channel(Generic[Served]):
    """One place through which compiled code reaches attention (a `LayerAttend`) or recurrences (a `Recur`).

    Attributes:
        number: by which operators find this channel. served: the attention that serves their calls now, or None.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.served: Served | None = None
        _channels[self.number] = self

    @contextmanager
    def carrying(self, served: Served) -> Iterator[None]:
        """Serve the operators' calls on this channel by `served` inside a block."""
        self.served = served
        try:
            yield
        finally:
            self.served = None

    @staticmethod
    def serving(number: int, what: str) -> Any:
        """The attention or recurrences that serve the channel of this number now.

        Raises:
            UnsupportedAttentionError: there is none: compiled code, `what` in words, was called outside its engine.
        """
        channel = _channels.get(number)
        if channel is None or channel.served is None:
            raise UnsupportedAttentionError(f"{what} was called outside SpeculativeModel")
        return channel.served


def opaque_operator(fake: Function, name: str = "") -> Callable[[Function], torch.library.CustomOpDef]:
    """Register a function as the operator `specdec::<its name>`, which the compiler does not look into.

    fake: returns, for the same arguments, empty results with the shapes and dtypes that the compiler needs.
    """

    def register(function: Function) -> Any:
        # mutates_args is empty although caches are written; the module's docstring explains why that is safe.
        operator = torch.library.custom_op(f"specdec::{name or function.__name__}", function, mutates_args=())
        operator.register_fake(fake)
        return operator

    return register


@opaque_operator(lambda q, k, v, *others: q.new_empty(q.shape[0], q.shape[1], v.shape[2]), "attend")
def opaque_attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, channel: int, layer: int) -> Tensor:
    """query [T, Hq, Dk], key [T, Hkv, Dk], value [T, Hkv, Dv], sinks [Hq] or None -> [T, Hq, Dv].

    Raises:
        UnsupportedAttentionError: see `Channel.serving`.
    """
    attend: LayerAttend = Channel.serving(channel, "compiled attention")
    return attend(layer, query, key, value, sinks).contiguous()  # the fake promises these strides to compiled code
