"""Tokens of a mixture of experts that are the oracle's best by another choice of its router, nearly as good.

In half precision and 8 bits a router's scores move by a few hundredths; where the last expert chosen and the first one
that is not are closer than that, a model may take the other one, and its logits are then those of other experts. Such
a token is no error, but that has to be shown: here the oracle computes it again with that choice alone changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.fp8 import gaps

NEAR = 0.2
"""Difference of two choices' scores that rounding may turn, of scores between 0 and 1 (sums of two for groups).
The oracle with every module's output rounded to bfloat16 moved it by up to 0.18 in 127 tokens of `DEEPSEEK`, 0.04 in
the median, and turned 4 choices."""
LARGE = 1.0
"""Gap to the best token, in the logits' deviations, from which on it must be explained."""
SHARE = 1 / 8
"""Of all tokens, those that may be explained so. 2 of 72 of `DEEPSEEK` are on a CPU, in bfloat16."""


class Choice:
    """One token's experts in one layer: what the router chose, and the next best choice.

    Attributes:
        margin: how much better the router's own choice is.
        own, other: ids of experts [k].
    """

    def __init__(self, scores: torch.Tensor, bias: torch.Tensor | float, config: Any) -> None:
        """scores [E]: sigmoid or softmax; bias [E]: added for the choice alone."""
        self._scores, self._config = scores, config
        rank, top = scores + bias, config.num_experts_per_tok
        groups, taken = getattr(config, "n_group", 1), getattr(config, "topk_group", 1)
        by_group = rank.view(groups, -1)
        order = by_group.topk(min(2, by_group.shape[1]), -1).values.sum(-1).argsort(descending=True)
        sums = by_group.topk(min(2, by_group.shape[1]), -1).values.sum(-1)

        def best(chosen: torch.Tensor) -> torch.Tensor:
            """Experts of these groups, best first."""
            masked = torch.full_like(by_group, -torch.inf)
            masked[chosen] = by_group[chosen]
            return masked.flatten().argsort(descending=True)[: len(chosen) * by_group.shape[1]]

        inside = best(order[:taken])
        self.own = inside[:top]
        found = []
        if len(inside) > top:
            found.append((float(rank[inside[top - 1]] - rank[inside[top]]), [*inside[: top - 1], inside[top]]))
        if groups > taken:
            swapped = torch.cat([order[: taken - 1], order[taken : taken + 1]])
            found.append((float(sums[order[taken - 1]] - sums[order[taken]]), [*best(swapped)[:top]]))
        self.margin, other = min(found, key=lambda each: each[0])
        self.other = torch.stack(other)

    def weights(self, experts: torch.Tensor) -> torch.Tensor:
        """The factors of these experts' outputs, [k]."""
        chosen = self._scores[experts]
        if self._config.norm_topk_prob:
            chosen = chosen / chosen.sum()
        return chosen * getattr(self._config, "routed_scaling_factor", 1.0)


def explained_gaps(oracle: PreTrainedModel, answer: Any) -> tuple[torch.Tensor, list[int]]:
    """As `gaps`, but large ones of tokens with a near tie of a router are those by its other choice.

    Where several layers have one, the best of all combinations counts.

    Returns:
        The gaps [T], and the tokens that were explained so.
    """
    found, explained = gaps(oracle, answer), []
    if bool((found < LARGE).all()):
        return found, explained
    seen: dict[int, list[Choice]] = {}
    with routed(oracle, lambda layer, choices: seen.setdefault(layer, choices) and None):
        gaps(oracle, answer)
    for token in (found >= LARGE).nonzero().flatten().tolist():
        place = len(answer.prompt_token_ids) - 1 + token
        near = [layer for layer, choices in seen.items() if choices[place].margin < NEAR]
        for layers in (some for count in range(1, len(near) + 1) for some in combinations(near, count)):
            with routed(oracle, lambda layer, _, layers=layers, place=place: place if layer in layers else None):
                other = float(gaps(oracle, answer)[token])
            if other < LARGE:
                found[token] = other
                explained.append(token)
                break
    return found, explained


@contextmanager
def routed(oracle: Any, turn: Callable[[int, list[Choice]], int | None]) -> Iterator[None]:
    """turn(layer, choices of all tokens) -> the token whose other choice that layer takes; None for no one."""
    plain = {}

    def route(number: int, mixture: Any) -> Callable[..., torch.Tensor]:
        def forward(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            choices = _choices(oracle.config, mixture.gate, hidden)
            assert [sorted(c.own.tolist()) for c in choices] == index.sort(-1).values.tolist(), "not the router's rule"
            if (token := turn(number, choices)) is not None:
                index, weights, choice = index.clone(), weights.clone(), choices[token]
                index[token], weights[token] = choice.other, choice.weights(choice.other).to(weights.dtype)
            return plain[number](hidden, index, weights)

        return forward

    for number, layer in enumerate(oracle.model.layers):
        if hasattr(layer.mlp, "experts"):
            plain[number] = layer.mlp.experts.forward
            layer.mlp.experts.forward = route(number, layer.mlp)
    try:
        yield
    finally:
        for number, forward in plain.items():
            oracle.model.layers[number].mlp.experts.forward = forward


def _choices(config: Any, gate: Any, hidden: torch.Tensor) -> list[Choice]:
    """By the configuration's own rule; hidden [T, H]."""
    logits = torch.nn.functional.linear(hidden.float(), gate.weight.float())
    bias = getattr(gate, "e_score_correction_bias", None)
    scores = logits.softmax(-1) if bias is None else logits.sigmoid()
    return [Choice(row, 0.0 if bias is None else bias.float(), config) for row in scores]


def check_tokens(oracle: PreTrainedModel, answers: list[Any]) -> None:
    """Every token is the oracle's best, or nearly, or nearly so by the other choice of a router's near tie; most of an
    answer are the best, and few are explained by a router."""
    explained = 0
    for answer in answers:
        found, turned = explained_gaps(oracle, answer)
        assert float(found.median()) == 0 and float(found.max()) < LARGE, (found, turned)
        explained += len(turned)
    assert explained <= SHARE * sum(len(answer.token_ids) for answer in answers)
