"""The law of draws by noise that is keyed by position, of one position and of neighbours, and how fine the noise is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specdec.requests.noise import gumbel, perturbed
from specdec.requests.sampling import SamplingTensors
from specdec.requests.target_probs import target_probs
from specdec.rounds.randomness import Role, position_bits, request_key

stats = pytest.importorskip("scipy.stats")

SMALLEST = 1e-4
"""Of a p-value: a right law fails one run in ten thousand, and the seeds here are always the same."""


def seeds_of(keys: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(position_bits(keys, positions, Role.TOKEN).view(np.int64))


def parameters(rows: int, **own: float) -> SamplingTensors:
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | own
    return SamplingTensors(
        **{
            name: torch.full((rows,), value, dtype=torch.float32 if name != "top_k" else torch.int32)
            for name, value in given.items()
        },
        filters=len(own) > 0,
    )


def drawn(logits: torch.Tensor, seeds: torch.Tensor, **own: float) -> torch.Tensor:
    """The draws [N] of one row of logits, once for each seed."""
    found = []
    for piece in seeds.split(20_000):
        scores = perturbed(logits.expand(len(piece), -1), parameters(len(piece), **own), piece)
        found.append(scores.argmax(1))
    return torch.cat(found)


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    kept = expected > 5
    rest = [counts[~kept].sum()], [expected[~kept].sum()]
    observed, right = np.append(counts[kept], rest[0]), np.append(expected[kept], rest[1])
    if right[-1] < 5:
        observed[-2], right[-2] = observed[-2:].sum(), right[-2:].sum()
        observed, right = observed[:-1], right[:-1]
    return float(stats.chisquare(observed, right * observed.sum() / right.sum()).pvalue)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    "own", [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "top_k": 20, "min_p": 0.01}]
)
def test_draws_follow_the_distribution(own: dict[str, float]) -> None:
    """200,000 draws of 97 tokens. The same test sees a temperature that is off by a tenth."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(1, 97)
    seeds = seeds_of(np.array([request_key(7, 0)], np.uint64), np.arange(200_000))
    right = target_probs(logits, parameters(1, **own))[0].double().numpy()
    found = np.bincount(drawn(logits, seeds, **own).numpy(), minlength=97)
    assert not found[right == 0].any() and p_value(found, right) > SMALLEST
    other = own | {"temperature": 1.1 * own.get("temperature", 1.0)}
    assert p_value(np.bincount(drawn(logits, seeds, **other).numpy(), minlength=97), right) < 1e-9


def dependence(first: torch.Tensor, second: torch.Tensor) -> float:
    table = np.zeros((8, 8))
    np.add.at(table, (first.numpy(), second.numpy()), 1)
    return float(stats.chi2_contingency(table).pvalue)


@pytest.mark.slow
def test_neighbouring_positions_samples_and_requests_are_independent() -> None:
    torch.manual_seed(1)
    logits, position = torch.randn(1, 8), np.arange(100_000)
    one, other, next_seed = (np.array([request_key(*own)], np.uint64) for own in ((3, 0), (3, 1), (4, 0)))
    draws = drawn(logits, seeds_of(one, position))
    for keys, at in ((one, position + 1), (other, position), (next_seed, position)):
        assert dependence(draws, drawn(logits, seeds_of(keys, at))) > SMALLEST
    # Planted: noise that is used again one position later, and a sample index that is left out.
    assert dependence(draws[1:], drawn(logits, seeds_of(one, position + 1))[:-1]) < 1e-9
    assert dependence(draws, drawn(logits, seeds_of(one, position))) < 1e-9


def repeated(values: torch.Tensor) -> int:
    return len(values) - len(values.unique())


def coarse(seeds: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Planted: noise of uniforms with 24 bits, which are those of torch."""
    return -(-torch.log1p(-torch.rand(len(seeds), len(ids)))).log()


def test_noise_is_fine_where_tokens_win() -> None:
    """Of four million numbers those above the 4,096th part differ; of 24 bits many are the same."""
    ids = torch.arange(2**22)
    for made, few in ((gumbel, True), (coarse, False)):
        best: Any = made(torch.tensor([[5]]), ids)[0]
        best = best[best > np.log(2**12)]
        assert 900 < len(best) < 1150 and (repeated(best) < 5) == few
    mean, deviation = float(gumbel(torch.tensor([[6]]), ids).mean()), float(gumbel(torch.tensor([[6]]), ids).std())
    assert mean == pytest.approx(0.5772, abs=2e-3) and deviation == pytest.approx(np.pi / 6**0.5, abs=2e-3)


def test_draft_and_token_of_one_distribution_are_the_same_in_any_vocabulary_of_a_draft() -> None:
    torch.manual_seed(2)
    logits, seeds = torch.randn(50, 40), torch.arange(50)
    own = torch.randperm(40)
    tokens = perturbed(logits, parameters(50), seeds).argmax(1)
    assert torch.equal(own[perturbed(logits[:, own], parameters(50), seeds, own).argmax(1)], tokens)
    assert not torch.equal(own[perturbed(logits[:, own], parameters(50), seeds).argmax(1)], tokens), "planted: no map"


@pytest.mark.parametrize("off", [0.0, 0.5, 2.0])
def test_acceptance_is_what_the_formula_says(off: float) -> None:
    torch.manual_seed(3)
    p, q = torch.randn(1, 30), torch.randn(1, 30)
    q = p + off * q
    seeds = torch.arange(40_000)
    same = float((drawn(p, seeds) == drawn(q, seeds)).double().mean())
    a, b = (x[0].double().softmax(0) for x in (p, q))
    predicted = float((1 / torch.maximum(a / a[:, None], b / b[:, None]).sum(1)).sum())
    assert same == pytest.approx(predicted, abs=0.01)
    variation = 0.5 * float((a - b).abs().sum())
    assert (1 - variation) / (1 + variation) <= predicted + 1e-9 <= 1 + 1e-9
