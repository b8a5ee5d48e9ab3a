"""Self-test of a mixture's routers: another expert than the reference's is allowed only where two nearly tie.

In half precision hidden states of two paths differ by rounding, and where a router's last chosen expert and the next
one are closer than that, the paths take different experts: with 8 of 256 experts every tenth token in each layer. So
the eager forward runs once more with the paged forward's choices where these differ. Then logits, and the states that
each mixture reads, are compared as in a model without experts. The number of different choices is limited, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.errors import UnsupportedModelError
from specdec.selftest.eager_reference import read_eager

MOST_MOVED = 0.25
"""Largest share of a mixture's choices (tokens x k) that may differ. It grows as the error of the states that routers
read: 0.02 for 8 of 256 experts and an error of 0.01, in bfloat16. A router that goes wrong has k / E of them right."""

_JUMP = 0.25
"""Difference of an expert's factor, of the token's largest one, that is no rounding but another choice."""


class Routed(NamedTuple):
    """Arguments of one call of a mixture of experts, for T tokens of a row.

    states: [T, H], its input. experts: [T, k] int64, the chosen ones. weights: their factors, [T, k].
    """

    states: Tensor
    experts: Tensor
    weights: Tensor

    def tokens(self, start: int, stop: int) -> Routed:
        """Those of tokens start … stop."""
        return Routed(*(each[start:stop] for each in self))

    def then(self, more: Routed) -> Routed:
        """The tokens of both."""
        return Routed(*(torch.cat(pair) for pair in zip(self, more, strict=True)))

    def moved(self, own: Routed) -> Tensor:
        """[T, k] bool: the experts here that `own` has not for that token, or with quite another factor.

        Phi-MoE's factors jump as well: by which of its two experts is first, and by which others are near.
        """
        same = self.experts[:, :, None] == own.experts[:, None, :]
        factors = (own.weights[:, None, :] * same).sum(-1)
        jumps = (self.weights - factors).abs() > _JUMP * own.weights.abs().amax(-1, keepdim=True)
        return ~same.any(-1) | jumps


class RoutedReader:
    """Arguments of the mixtures of experts for each token, from the paged forward that read it last.

    rows: row -> the calls of mixtures in the order of a forward, for all of its tokens that count as read.
    """

    def __init__(self) -> None:
        self.rows: dict[int, list[Routed]] = {}

    @contextmanager
    def reading(self, model: nn.Module, start: np.ndarray, stop: np.ndarray) -> Iterator[None]:
        """Inside, one forward reads the tokens start … stop [B] of rows 0 … B-1, replacing records from `start` on."""
        with _calls(model) as seen:
            yield
        begin = 0
        for row, (a, b) in enumerate(zip(start.tolist(), stop.tolist(), strict=True)):
            own = [call.tokens(begin, begin + b - a) for call in seen]
            before = self.rows.get(row)
            self.rows[row] = (
                own if before is None else [x.tokens(0, a).then(y) for x, y in zip(before, own, strict=True)]
            )
            begin += b - a

    def read_eager(self, model: PreTrainedModel, row: int, ids: Tensor) -> tuple[Tensor, list[Routed]]:
        """A row's logits [T, V] by the model's own eager forward with the experts chosen before, and its own calls."""
        with _calls(model, self.rows[row]) as own:
            (logits,) = read_eager(model, [ids])
        return logits, own


def check_choices(model: PreTrainedModel, reader: RoutedReader, right: Sequence[list[Routed]]) -> None:
    """Refuse a model of which a mixture's choices differ by more than near ties from its eager forward's (`right`).

    Raises:
        UnsupportedModelError: more than a quarter of them do.
    """
    moved = [[a.moved(b) for a, b in zip(reader.rows[row], own, strict=True)] for row, own in enumerate(right)]
    shares = [float(torch.cat(rows).double().mean()) for rows in zip(*moved, strict=True)]
    most = max(shares, default=0.0)
    if most > MOST_MOVED:
        raise UnsupportedModelError(
            f"{type(model).__name__} comes out wrong through the paged attention: of the experts that mixture "
            f"{shares.index(most) + 1} of {len(shares)} is given, {most:.0%} are others than in its own eager forward "
            f"(allowed, for near ties of its router: {MOST_MOVED:.0%})"
        )


def has_mixtures(model: nn.Module) -> bool:
    """Whether the model has experts that a router chooses, in the form of transformers 5."""
    return any(True for _ in experts_of(model))


def experts_of(model: nn.Module) -> Iterator[nn.Module]:
    """transformers calls them (states [T, H], index [T, k], weights [T, k]); calls of another form are ignored."""
    return (module for name, module in model.named_modules() if name.endswith(".experts"))


@contextmanager
def _calls(model: nn.Module, given: Sequence[Routed] = ()) -> Iterator[list[Routed]]:
    """The calls of mixtures inside, as the routers made them.

    given: for each call the choices that replace the router's, for tokens with a changed choice.
    """
    seen: list[Routed] = []

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        tensors = len(inputs) == 3 and all(isinstance(x, Tensor) and x.ndim == 2 for x in inputs)
        if not tensors or inputs[1].is_floating_point() or inputs[2].shape != inputs[1].shape:
            return None
        own = Routed(*inputs)
        other = given[len(seen)] if len(seen) < len(given) else None
        seen.append(own)
        if other is None or other.experts.shape != own.experts.shape:
            return None
        moved = other.moved(own).any(-1, keepdim=True)
        return own.states, own.experts.where(~moved, other.experts), own.weights.where(~moved, other.weights)

    hooks = [module.register_forward_pre_hook(before) for module in experts_of(model)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
