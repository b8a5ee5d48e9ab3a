"""Which experts a model's routers choose, counted on the tokens that a benchmark generated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel


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
    size = sum(p[0].numel() for p in mixtures[0].parameters())
    layers, per_token = len(mixtures), chosen.shape[-1]
    total = float(distinct.sum())
    return ExpertWork(total, total * size, float(layers * per_token * size), float(layers))


def _mixtures(model: PreTrainedModel) -> list[Any]:
    return [m for m in model.modules() if hasattr(m, "has_gate") and hasattr(m, "num_experts")]


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
