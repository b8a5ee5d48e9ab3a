"""Which experts a model's routers choose, counted on the tokens that a benchmark generated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from specdec.ops.mixtures.choice import CAPTURABLE
from specdec.wrapped import quantised_layers
from specdec.wrapped.quantised_layers import Mxfp4Experts


@dataclass(frozen=True)
class ExpertWork:
    """Experts at work in one pass.

    Attributes:
        distinct: experts chosen by at least one token, summed over layers and averaged over rounds.
        weights: their matmul weights; weights_a_token: those that one token uses.
        layers: layers with experts.
    """

    distinct: float = 0.0
    weights: float = 0.0
    weights_a_token: float = 0.0
    layers: float = 0.0

    def scaled(self, share: float) -> ExpertWork:
        """The same for a share of the layers."""
        return ExpertWork(
            self.distinct * share, self.weights * share, self.weights_a_token * share, self.layers * share
        )


@dataclass(frozen=True)
class HeldRoutes:
    """Experts of every mixture under some modules by token slot, drawn uniformly, in place of the routers' choice.

    The routers still run. So all that is compared computes with the same experts, and their number is known.

    Attributes:
        tables: [T, k] int64 of each mixture, of the target's first. target: how many are the target's. size: matmul
            weights of an expert. bytes_a_weight: of the target's experts, as they are stored.
    """

    tables: tuple[torch.Tensor, ...]
    target: int
    size: float
    bytes_a_weight: float

    @classmethod
    def of(cls, target: torch.nn.Module, head: torch.nn.Module, tokens: int) -> HeldRoutes:
        """Hold them from now on, in rounds from graphs, for passes of at most so many tokens; before wrapping."""
        own, drafting = _mixtures(target), _mixtures(head)
        device = next(own[0].parameters()).device
        rng, tables = torch.Generator(device).manual_seed(0), []
        for mixture in own + drafting:
            experts, chosen = mixture.num_experts, int(mixture.config.num_experts_per_tok)
            parts = [
                torch.rand(min(4096, tokens - i), experts, device=device, generator=rng).topk(chosen, -1).indices
                for i in range(0, tokens, 4096)
            ]
            tables.append(torch.cat(parts))
            # A buffer: sizes of other tensors are symbols, of each layer another, and it would be compiled by itself.
            # In a module of its own: a quantised layer's buffers are counted as weights.
            mixture.held_routes = torch.nn.Module().eval()
            mixture.held_routes.register_buffer("table", tables[-1], persistent=False)
            if isinstance(mixture, Mxfp4Experts):
                mixture.__class__ = _HeldMxfp4
        ALL_EXPERTS_FUNCTIONS.register(CAPTURABLE, partial(_held, ALL_EXPERTS_FUNCTIONS[CAPTURABLE]))
        quantised_layers.own_form = partial(_held, quantised_layers.own_form)
        size = _size(own[0])
        return cls(tuple(tables), len(own), size, sum(p[0].nbytes for p in own[0].parameters()) / size)

    def work(self, tokens: int) -> ExpertWork:
        """Of a pass of the target over so many tokens."""
        distinct = float(sum(len(table[:tokens].unique()) for table in self.tables[: self.target]))
        each = self.target * self.tables[0].shape[1] * self.size
        return ExpertWork(distinct, distinct * self.size, each, float(self.target))


def _held(
    plain: Any, experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *others: Any
) -> torch.Tensor:
    """An experts function that takes the held routes of a mixture that has some."""
    held = getattr(experts, "held_routes", None)
    if held is not None and torch.compiler.is_compiling():  # self-tests read the same tokens in other places
        index = held.table[: hidden.shape[0]]
    found: torch.Tensor = plain(experts, hidden, index, weights, *others)
    return found


class _HeldMxfp4(Mxfp4Experts):
    def forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return _held(Mxfp4Experts.forward, self, hidden_states, index, weights)


_HeldMxfp4.__name__ = Mxfp4Experts.__name__  # by which packed experts are known


def _size(mixture: Any) -> float:
    """Matmul weights of an expert; two a byte in MXFP4."""
    matrices = [p for n, p in mixture.named_parameters(recurse=False) if n.endswith(("_proj", "_blocks"))]
    return float(sum(p[0].numel() * (2 if p.dtype == torch.uint8 else 1) for p in matrices))


@torch.inference_mode()
def expert_work(model: PreTrainedModel, sequences: list[list[int]], width: int, last: int) -> ExpertWork:
    """Experts of a pass over `width` tokens of every sequence.

    Every sequence is read once by the model itself, and its routers' choices are kept. A round then takes `width`
    neighbouring positions of each sequence, at the same distance from its end; the numbers are means over all such
    rounds in the `last` tokens. Rejected drafts, which a sequence does not hold, are taken to
    choose as accepted ones do.
    """
    mixtures = _mixtures(model)
    if not mixtures:
        return ExpertWork()
    tokens = last // width * width
    chosen = torch.stack([_choices(model, mixtures, s)[:, -tokens:] for s in sequences])  # [B, layers, tokens, k]
    rounds = chosen.unflatten(2, (-1, width))  # [B, layers, rounds, width, k]
    by_round = rounds.permute(1, 2, 0, 3, 4).flatten(2)  # [layers, rounds, B·width·k]
    used = torch.zeros(*by_round.shape[:2], mixtures[0].num_experts, device=by_round.device)
    distinct = used.scatter(2, by_round, 1.0).sum(2).mean(1)  # [layers]
    size = _size(mixtures[0])
    layers, per_token = len(mixtures), chosen.shape[-1]
    total = float(distinct.sum())
    return ExpertWork(total, total * size, float(layers * per_token * size), float(layers))


def _mixtures(model: PreTrainedModel) -> list[Any]:
    return [m for name, m in model.named_modules() if name.endswith(".experts") and hasattr(m, "num_experts")]


def _choices(model: PreTrainedModel, mixtures: list[Any], sequence: list[int]) -> torch.Tensor:
    """[layers, T, k] experts that each token of a sequence is sent to."""
    with _noted(mixtures) as notes:
        model(input_ids=torch.tensor([sequence], device=model.device), use_cache=False, logits_to_keep=1)
    return torch.stack(notes)


@contextmanager
def _noted(mixtures: list[Any]) -> Iterator[list[torch.Tensor]]:
    notes: list[torch.Tensor] = []
    hooks = [m.register_forward_pre_hook(lambda module, args: notes.append(args[1])) for m in mixtures]
    try:
        yield notes
    finally:
        for hook in hooks:
            hook.remove()
