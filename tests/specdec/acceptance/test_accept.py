"""Acceptance, judged exactly: over all drafts and a fine grid of uniforms the outcome is the target's own p."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fakes import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec.acceptance.accept
from specdec.acceptance.accept import SampledInputs, VerificationResult, accept_greedy, accept_sampled

GRID = 120


def distribution(seed: int, size: int, zeros: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(size, generator=generator) ** 3
    weights[torch.randperm(size, generator=generator)[:zeros]] = 0
    return weights / weights.sum()


def first_token_distribution(p: torch.Tensor, q: torch.Tensor, one_hot: bool = False) -> torch.Tensor:
    """Distribution of the first token that one draft x ~ q leads to, over a grid of accept and resample uniforms."""
    size, cells = len(p), GRID * GRID
    grid = (torch.arange(GRID) + 0.5) / GRID
    accept, after = (g.reshape(-1) for g in torch.meshgrid(grid, grid, indexing="ij"))
    total = torch.zeros(size, dtype=torch.float64)
    for x in range(size):
        inputs = SampledInputs(
            target_probs=p.expand(cells, 2, size),
            draft_probs=None if one_hot else q.expand(cells, 1, size),
            accept_uniform=accept[:, None],
            next_uniform=torch.stack([after, after], 1),
        )
        drafts = torch.full((cells, 1), x)
        result = specdec.acceptance.accept.accept_sampled(drafts, torch.ones(cells, dtype=torch.long), inputs)
        first = torch.where(result.num_accepted == 1, x, result.next_token)
        total += q[x].double() * torch.bincount(first, minlength=size).double() / cells
    return total


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("zeros", [(0, 0), (2, 0), (0, 3), (3, 3)])
def test_the_first_token_has_the_targets_distribution(seed: int, zeros: tuple[int, int]) -> None:
    """Also where q knows tokens that p excludes (top-k) and where q knows only some (reduced draft vocabulary)."""
    p, q = distribution(seed, 6, zeros[0]), distribution(seed + 50, 6, zeros[1])
    assert torch.allclose(first_token_distribution(p, q), p.double(), atol=0.02)


def test_greedy_drafts_are_one_hot() -> None:
    p = distribution(3, 5)
    for x in range(5):
        q = torch.nn.functional.one_hot(torch.tensor(x), 5).float()
        assert torch.allclose(first_token_distribution(p, q, one_hot=True), p.double(), atol=0.02)


def test_equal_distributions_accept_everything() -> None:
    p = distribution(1, 6)
    drafts = torch.randint(6, (500, 3), generator=torch.Generator().manual_seed(0))
    inputs = SampledInputs(p.expand(500, 4, 6), p.expand(500, 3, 6), torch.rand(500, 3), torch.rand(500, 4))
    assert accept_sampled(drafts, torch.full((500,), 3), inputs).num_accepted.eq(3).all()


def wrong_half(drafts: torch.Tensor, n: torch.Tensor, inputs: SampledInputs) -> VerificationResult:
    """Planted: accept when p > q/2."""
    assert inputs.draft_probs is not None
    p = inputs.target_probs[:, :-1].gather(2, drafts[:, :, None])[:, :, 0]
    q = inputs.draft_probs.gather(2, drafts[:, :, None])[:, :, 0]
    sure = SampledInputs(
        inputs.target_probs, inputs.draft_probs, torch.where(p > q / 2, -1.0, 2.0), inputs.next_uniform
    )
    return accept_sampled(drafts, n, sure)


def test_a_wrong_rule_is_seen_by_the_exact_judgement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specdec.acceptance.accept, "accept_sampled", wrong_half)
    p, q = distribution(0, 6), distribution(50, 6)
    assert not torch.allclose(first_token_distribution(p, q), p.double(), atol=0.05)


def slow_greedy(drafts: list[int], target: list[int]) -> tuple[int, int]:
    n = 0
    while n < len(drafts) and drafts[n] == target[n]:
        n += 1
    return n, target[n]


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=5), st.integers(0, 999)), min_size=1, max_size=5))
def test_greedy_acceptance_is_the_longest_common_prefix(rows: list[tuple[list[int], int]]) -> None:
    width = max(len(d) for d, _ in rows)
    target = [np.random.default_rng(seed).integers(0, 3, width + 1).tolist() for _, seed in rows]
    drafts = torch.tensor([d + t[len(d) : -1] for (d, _), t in zip(rows, target, strict=True)], dtype=torch.long)
    result = accept_greedy(drafts.view(len(rows), width), torch.tensor([len(d) for d, _ in rows]), torch.tensor(target))
    right = [slow_greedy(d, t) for (d, _), t in zip(rows, target, strict=True)]
    assert list(zip(result.num_accepted.tolist(), result.next_token.tolist(), strict=True)) == right


@pytest.mark.parametrize("width", [0, 1, 4])
def test_both_rules_decide_greedy_rows_alike(width: int) -> None:
    """In a mixed batch a greedy row has one-hot p and q; the result is the greedy one, whatever the uniforms."""
    generator = torch.Generator().manual_seed(0)
    rows, vocab = 64, 3
    target = torch.randint(vocab, (rows, width + 1), generator=generator)
    drafts = torch.randint(vocab, (rows, width), generator=generator)
    n = torch.randint(width + 1, (rows,), generator=generator)
    one_hot = torch.nn.functional.one_hot
    inputs = SampledInputs(
        one_hot(target, vocab).float(),
        one_hot(drafts, vocab).float() if width else torch.zeros(rows, 0, vocab),
        torch.rand(rows, width, generator=generator),
        torch.rand(rows, width + 1, generator=generator),
    )
    greedy, sampled = accept_greedy(drafts, n, target), accept_sampled(drafts, n, inputs)
    assert torch.equal(greedy.num_accepted, sampled.num_accepted)
    assert torch.equal(greedy.next_token, sampled.next_token)


def drawn(p: torch.Tensor, q: torch.Tensor | None, drafts: list[int], n: int, accept: float) -> torch.Tensor:
    """[V] distribution of the next token over a grid of its uniform at its own place; p [K+1, V], q [K, V].

    At the other places the uniform is 0: the first token of p is drawn there.
    """
    cells, k, size = GRID * 10, len(drafts), p.shape[1]
    uniform = torch.zeros(cells, k + 1)
    at = n if accept == 0 else 0
    uniform[:, at] = (torch.arange(cells) + 0.5) / cells
    inputs = SampledInputs(
        p.expand(cells, k + 1, size),
        None if q is None else q.expand(cells, k, size),
        torch.full((cells, k), accept),
        uniform,
    )
    result = accept_sampled(torch.tensor([drafts] * cells), torch.full((cells,), n), inputs)
    assert result.num_accepted.eq(at).all()
    return torch.bincount(result.next_token, minlength=size).double() / cells


@pytest.mark.parametrize("n", [0, 1, 2])
@pytest.mark.parametrize("one_hot", [False, True])
def test_after_the_last_draft_the_next_token_has_the_targets_distribution(n: int, one_hot: bool) -> None:
    """Also in a row with fewer drafts than places for them: neither the remainder of a draft nor of a place without."""
    p = torch.stack([distribution(seed, 5) for seed in range(3)])
    q = None if one_hot else torch.stack([distribution(seed + 9, 5) for seed in range(2)])
    drafts = [int(p[0].argmax()), int(p[1].argmax())]
    assert torch.allclose(drawn(p, q, drafts, n, 0.0), p[n].double(), atol=0.003)


def test_after_a_rejection_it_is_the_remainder_of_that_draft() -> None:
    """Not of the first draft, and without mass, p itself."""
    p, q = torch.tensor([[0.1, 0.6, 0.3]] * 3), torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]])
    inputs = SampledInputs(p[None], q[None], torch.tensor([[0.1, 0.9]]), torch.tensor([[0.0, 0.5, 0.0]]))
    for uniform, token in ((0.0, 1), (0.79, 1), (0.99, 1)):  # max(p - q[1], 0) = [0, 0.4, 0]
        inputs.next_uniform[0, 1] = uniform
        result = accept_sampled(torch.tensor([[1, 2]]), torch.tensor([2]), inputs)
        assert (result.num_accepted.tolist(), result.next_token.tolist()) == ([1], [token])
    same = SampledInputs(p[None, :2], p[None, :1], torch.tensor([[1.0]]), torch.tensor([[0.05, 0.9]]))
    result = accept_sampled(torch.tensor([[1]]), torch.tensor([1]), same)  # rejected by a uniform that is not below 1
    assert (result.num_accepted.tolist(), result.next_token.tolist()) == ([0], [0])


def test_a_draft_that_the_target_excludes_is_never_accepted() -> None:
    p, q = torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([[0.5, 0.5]])
    inputs = SampledInputs(p[None], q[None], torch.tensor([[0.0]]), torch.tensor([[0.3, 0.3]]))
    assert accept_sampled(torch.tensor([[0]]), torch.tensor([1]), inputs).num_accepted.tolist() == [0]
