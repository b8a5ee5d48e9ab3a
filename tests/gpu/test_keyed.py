"""Draws by noise that is keyed by position: the kernel's law at a large vocabulary, and words that no K changes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from specdec.model import SpeculativeModel
from specdec.ops.draws import draw_keyed
from specdec.requests.noise import perturbed
from specdec.requests.sampling import SamplingParams, SamplingTensors
from specdec.requests.target_probs import target_probs
from tests.specdec.requests.test_noise import parameters, request_key, seeds_of, stats

CUDA, VOCAB, SMALLEST = torch.device("cuda"), 151_936, 1e-4
FILTERS: list[dict[str, float]] = [{}, {"top_p": 0.9}, {"temperature": 0.7, "top_k": 50, "min_p": 0.01}]


def on_gpu(rows: int, **own: float) -> SamplingTensors:
    given = parameters(rows, **own)
    return SamplingTensors(*(column.to(CUDA) for column in given.columns), filters=given.filters)


def draws(logits: torch.Tensor, positions: np.ndarray, sample: int = 0, **own: float) -> torch.Tensor:
    """[N] draws of one row of logits at these positions."""
    seeds = seeds_of(np.array([request_key(7, sample)], np.uint64), positions).to(CUDA)
    found = []
    for piece in seeds.split(16_384):
        index = torch.zeros(len(piece), dtype=torch.int64, device=CUDA)
        found.append(draw_keyed(logits, logits.argmax(1), on_gpu(len(piece), **own), piece[:, None], index=index))
    return torch.cat(found)


@cache
def flat_and_steep() -> torch.Tensor:
    """[1, V] logits: a head of likely tokens and a tail that has a third of the mass."""
    torch.manual_seed(3)
    logits = torch.randn(1, VOCAB, device=CUDA)
    logits[0, :40] += torch.linspace(11, 6, 40, device=CUDA)
    return logits


def p_value(found: torch.Tensor, right: torch.Tensor) -> float:
    """Chi-square of draws [N] against probabilities [V]; the tail is pooled into 256 bins by id."""
    bins = torch.arange(VOCAB, device=CUDA) % 256 + 40
    bins[:40] = torch.arange(40, device=CUDA)
    counts = torch.bincount(bins[found], minlength=296).cpu().numpy()
    expected = torch.zeros(296, dtype=torch.float64, device=CUDA).index_add_(0, bins, right).cpu().numpy() * len(found)
    kept = expected > 0
    assert not counts[~kept].any()
    return float(stats.chisquare(counts[kept], expected[kept] * counts.sum() / expected.sum()).pvalue)


@pytest.mark.parametrize("own", FILTERS)
def test_two_million_draws_follow_the_distribution(own: dict[str, float]) -> None:
    """And a temperature that is off by 2 % is seen."""
    logits, positions = flat_and_steep(), np.arange(2_000_000)
    right = target_probs(logits, on_gpu(1, **own))[0].double()
    assert p_value(draws(logits, positions, **own), right) > SMALLEST
    other = own | {"temperature": 1.02 * own.get("temperature", 1.0)}
    assert p_value(draws(logits, positions, **other), right) < 1e-9


def test_neighbouring_positions_and_samples_are_independent() -> None:
    logits, positions = flat_and_steep(), np.arange(500_000)
    one, following, other = (
        draws(logits, at, sample) for at, sample in ((positions, 0), (positions + 1, 0), (positions, 1))
    )

    def dependence(first: torch.Tensor, second: torch.Tensor) -> float:
        table = np.zeros((41, 41))
        np.add.at(table, (first.clamp(max=40).cpu().numpy(), second.clamp(max=40).cpu().numpy()), 1)
        return float(stats.chi2_contingency(table).pvalue)

    assert dependence(one, following) > SMALLEST and dependence(one, other) > SMALLEST
    assert dependence(one[1:], following[:-1]) < 1e-9  # the same noise: planted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("own", FILTERS)
def test_the_kernel_draws_as_torch_does(own: dict[str, float], dtype: torch.dtype) -> None:
    """But for scores that are nearly equal; the same bits in any company."""
    torch.manual_seed(1)
    logits, seeds = 3 * torch.randn(64, VOCAB, device=CUDA).to(dtype), torch.randint(2**62, (64,), device=CUDA)
    found = draw_keyed(logits, logits.float().argmax(1), on_gpu(64, **own), seeds[:, None])
    scores = perturbed(logits, on_gpu(64, **own), seeds)
    behind = scores.amax(1) - scores.gather(1, found[:, None])[:, 0]
    assert float(behind.max()) < 1e-4 and int((behind > 0).sum()) <= 1
    for rows in (1, 7):
        alone = draw_keyed(logits[:rows], logits[:rows].float().argmax(1), on_gpu(rows, **own), seeds[:rows, None])
        assert torch.equal(alone, found[:rows])


ASKED = [
    SamplingParams(48, temperature=(0.0, 0.7, 1.0, 1.3)[i % 4], top_p=(1.0, 0.9)[i // 4 % 2], seed=i) for i in range(24)
]


def words(k: int, **options: Any) -> tuple[list[list[int]], Any]:
    questions = [
        [{"role": "user", "content": f"Tom has {i} boxes of {3 + i % 9} eggs. How many eggs?"}] for i in range(24)
    ]
    drafts: dict[str, Any] = {"draft": "auto", "num_speculative_tokens": k} if k else {}
    with SpeculativeModel.from_pretrained("gsm-llama", sampling="keyed", max_num_seqs=7, **drafts, **options) as model:
        assert model.graphs == "on"
        return [list(c.token_ids) for c in model.generate(questions, ASKED)], model.engine_stats


@pytest.mark.parametrize("backend", ["flashinfer", "batch_invariant"])
def test_no_k_changes_a_word_in_graphs(backend: str) -> None:
    """In bfloat16 with invariant kernels, bit for bit; without them in float16 but for near ties, which are rare."""
    dtype = torch.bfloat16 if backend == "batch_invariant" else torch.float16
    right, _ = words(0, dtype=dtype, backend=backend)
    assert len({tuple(tokens) for tokens in right}) > 18
    for k in (1, 3, 5):
        found, seen = words(k, dtype=dtype, backend=backend)
        different = sum(one != other for one, other in zip(right, found, strict=True))
        assert seen.tau > 1.5 and different <= (0 if backend == "batch_invariant" else 4)
