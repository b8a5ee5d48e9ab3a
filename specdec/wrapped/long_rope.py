"""Rotary embeddings of type longrope: which tokens have the short factors and which the long ones.

transformers chooses between the two sets of frequencies by the largest position of a *forward*: the short factors while
it is below `original_max_position_embeddings`, else the long ones for all its tokens. So in `generate` a prompt of at
most `original` tokens, and the tokens after it up to that length, have the short factors, later tokens the long ones; a
longer prompt has the long ones from its first token on. Models of the Phi-3 family drop their cache when a request
passes `original`: all of its tokens are read again with the long factors. (transformers 5.17 drops the cache and reads
only the last token; this module follows the intended rule, which later releases implement.)

In a ragged batch each token chooses by its position alone. Rows that read their first tokens with the long factors are
given positions below 0: p - original. So one lookup in a table of cos and sin, made by the model's own rotary modules,
serves every token without a branch on data.

Source: transformers, modeling_rope_utils.py (longrope_frequency_update), models/phi3/modeling_phi3.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.checking import require
from attention.hf.patches import Value
from attention.staging import A, array

_ORIGINAL = "original_max_position_embeddings"
_CHUNK = 8192
"""Positions whose cos and sin are computed at once: a module computes them in float32."""


class LongRopeRule(NamedTuple):
    """When a request has the long factors of a longrope rotary embedding from its first token on.

    original: the length up to which factors are short. rereads: whether `generate` reads a request again when it passes
    that length; else the keys before stay, and later tokens alone have the long factors.
    """

    original: int
    rereads: bool = False

    def is_long(self, prompt_len: int, num_committed: int) -> bool:
        """Whether a request that begins to read, or begins again after a preemption, has the long factors.

        >>> LongRopeRule(8).is_long(8, 12), LongRopeRule(8, rereads=True).is_long(8, 12), LongRopeRule(8).is_long(9, 9)
        (False, True, True)
        """
        return (num_committed if self.rereads else prompt_len) > self.original

    def encoded(self, positions: np.ndarray, long: np.ndarray) -> np.ndarray:
        """positions [T] as the target's rotary modules get them: with `long` [T] bool, those below `original` lie below
        0.

        >>> LongRopeRule(4).encoded(np.array([0, 5, 0, 5]), np.array([False, False, True, True])).tolist()
        [0, 5, -4, 5]
        """
        return positions - self.original * (long & (positions < self.original))


@dataclass(frozen=True)
class RotaryPositions(Generic[A]):
    """Positions of a batch's tokens as the rotary modules of a longrope model get them, where they are not its own.

    Attributes:
        positions: [T] int64, see `LongRopeRule.encoded`. what: see `attention.batch.host.BatchExtra`.
    """

    positions: A = array(np.int64, "tokens")
    what: ClassVar[str] = "long rotary factors"

    def validate(self, query_lens: np.ndarray) -> None:
        require(len(self.positions) == query_lens.sum(), "rotary positions must be [T]")  # type: ignore[arg-type]


@dataclass(frozen=True)
class LongRope:
    """The rotary modules of a longrope model, which take (x, position_ids [1, T]), and the rule of its requests."""

    rule: LongRopeRule
    modules: tuple[nn.Module, ...]


def find_long_rope(model: PreTrainedModel) -> LongRope | None:
    """The longrope modules of a model; None where it has none, or where the behaviour of `generate` is uncertain.

    The latter are modules of other code than transformers' or with factors by type of layer, and a model that drops its
    cache at another length than that at which its factors change.
    """
    modules = tuple(module for module in model.modules() if getattr(module, "rope_type", None) == "longrope")
    originals = {_original_of(module) for module in modules}
    original = originals.pop() if len(originals) == 1 else None
    if original is None:
        return None
    config = model.config.get_text_config()
    prepare: Any = getattr(type(model), "prepare_inputs_for_generation", None)  # no model without `generate` has one
    # A model that drops its cache has this name in the bytecode that prepares a step, and no other mark.
    drops = prepare is not None and _ORIGINAL in inspect.unwrap(prepare).__code__.co_names
    rereads = drops and hasattr(config, _ORIGINAL)
    if rereads and getattr(config, _ORIGINAL) != original:
        return None
    return LongRope(LongRopeRule(original, rereads), modules)


def _original_of(module: nn.Module) -> int | None:
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    value = parameters.get(_ORIGINAL)
    return None if value is None else int(value)


def looked_up(found: LongRope, x: Tensor, max_positions: int) -> list[Value]:
    """Attributes that make the rotary modules look up cos and sin by token, to be borrowed for a specdec forward.

    x: any tensor of the model's dtype and device; max_positions: positions that a token may have.
    """
    original = found.rule.original
    return [(module, "forward", _lookup(module, x, max_positions, original)) for module in found.modules]


@torch.no_grad()
def _lookup(module: nn.Module, x: Tensor, max_positions: int, original: int) -> Callable[..., tuple[Tensor, ...]]:
    """The replacement for a module's forward."""
    positions = torch.arange(max(max_positions, original + 1), device=x.device)
    chunks = [_long(module, x, part, original) for part in positions.split(_CHUNK)]
    long = [torch.cat(parts) for parts in zip(*chunks, strict=True)]
    short = module(x, positions[:original][None])  # last: it leaves the module's frequencies as they were loaded
    tables = [torch.cat((a[:original], b[0], a[original:])) for a, b in zip(long, short, strict=True)]

    def lookup(x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        places = position_ids + original
        return tuple(table[places].to(x.dtype) for table in tables)

    return lookup


def _long(module: nn.Module, x: Tensor, positions: Tensor, original: int) -> list[Tensor]:
    """Each result [T, D] of a module for these positions with the long factors: one more makes the forward long."""
    beyond = torch.cat((positions, positions.new_full((1,), original)))
    return [result[0, :-1] for result in module(x, beyond[None])]
