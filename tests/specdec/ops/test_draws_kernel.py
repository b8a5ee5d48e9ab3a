"""Filters and draws of short rows in Triton's interpreter, at the places where they are decided by one token."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

import specdec.ops.draws_kernel
import specdec.ops.filters_kernel
import specdec.ops.greedy_kernel
from specdec.ops.draws import DraftPlaces, Filtered, draw_drafts, draw_keyed, filter_rows, inverse_map
from specdec.requests.noise import perturbed
from specdec.requests.target_probs import draw, target_probs
from tests.specdec.ops.test_filters import CPU, assert_decided, check, filtered, parameters

VOCAB = 80
BANNED, NONE = -torch.inf, (1.0, 0, 1.0, 0.0)
"""(temperature, top_k, top_p, min_p): no filter."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of a row, of which the last is cut, two by one program."""
    torch.manual_seed(0)
    for name, value in {"_PART": 32, "_SUMS_TILE": 16, "_SHARE": 16, "_PROGRAMS": 2}.items():
        monkeypatch.setattr(specdec.ops.filters_kernel, name, value)
    monkeypatch.setattr(specdec.ops.draws_kernel, "_PART", 32)
    monkeypatch.setattr(specdec.ops.greedy_kernel, "_PART", 32)


def drawn(logits: torch.Tensor, rows: list[tuple[float, int, float, float]], uniform: torch.Tensor) -> list[int]:
    """A draw of each row, which is the reference's."""
    sampling, ids = parameters(rows), logits.nan_to_num(-9).argmax(-1)
    draw_drafts(logits, ids, sampling, uniform[:, None], 0, Filtered.empty(len(rows), device=CPU))
    assert ids.tolist() == draw(target_probs(logits, sampling), uniform).tolist()
    return ids.tolist()


def test_thresholds_below_zero_and_at_both_zeros() -> None:
    """In half precision, whose numbers end in zeros: those below 0 the other way round."""
    negative = -(torch.rand(VOCAB) + 0.5).half()
    zeros = torch.where(torch.rand(VOCAB) < 0.5, 0.0, -0.0).half()
    check(torch.stack([negative, zeros]), parameters([(0.7, 20, 0.5, 0.0), (1.0, 0, 0.5, 0.0)]))


def test_min_p_decides_where_it_leaves_less_than_the_others() -> None:
    check(torch.randn(2, VOCAB) * 2, parameters([(1.0, 0, 0.999, 0.3), (1.0, 60, 0.99, 0.4)]))


def test_a_nan_counts_for_nothing() -> None:
    logits, rows = torch.randn(1, VOCAB), parameters([(1.0, 0, 0.7, 0.1)])
    logits[:, 40], without = torch.nan, logits.clone()
    without[:, 40] = BANNED
    peaks, out = without.argmax(-1), Filtered.empty(1, device=CPU)
    filter_rows(logits, peaks, rows, out)
    assert torch.equal(out.stats, filtered(without, rows).stats)


def test_draws_begin_and_end_with_tokens_that_have_weight() -> None:
    """At the uniforms' ends, and between two parts: the first part has no token that may come, the last ends early."""
    logits = torch.full((4, VOCAB), BANNED)
    logits[:, [35, 60, 70]] = torch.tensor([1.0, 1.0, 1.0])
    assert drawn(logits, [NONE] * 4, torch.tensor([0.0, 0.3334, 0.6667, 1 - 2**-24])) == [35, 60, 70, 70]


def test_of_equal_logits_the_last_ones_are_drawn_and_min_p_keeps_the_peaks() -> None:
    """Top-p drops the first of equal tokens; min-p of 1 keeps all that are as probable as the largest."""
    logits = torch.full((4, VOCAB), -30.0)
    logits[:, [5, 40, 41, 79]] = 2.0
    half, peaks = (1.0, 0, 0.5, 0.0), (1.0, 0, 1.0, 1.0)
    uniform = torch.tensor([0.0, 0.6, 0.0, 0.3])
    assert drawn(logits, [half, half, peaks, peaks], uniform) == [41, 79, 5, 40]


def test_a_token_of_little_weight_is_drawn() -> None:
    logits = torch.full((1, VOCAB), -7.0)
    logits[0, 3] = 0.0
    below = float(target_probs(logits, parameters([NONE]))[0, :60].sum())
    assert drawn(logits, [NONE], torch.tensor([below + 1e-4])) == [60]


def test_drafts_after_accepted_ones_have_their_own_uniforms_and_places() -> None:
    """And rows of copied logits lie as far apart as they are said to."""
    logits, uniform, accepted = torch.randn(2, VOCAB), torch.rand(2, 4), torch.tensor([2, 0])
    sampling, ids = parameters([NONE, (1.0, 0, 0.9, 0.0)]), logits.argmax(-1)
    copies, drafts = torch.zeros(2, 100), torch.full((2,), -1)
    places = DraftPlaces(copies[:, :VOCAB], drafts, None)
    draw_drafts(logits, ids, sampling, uniform, 1, Filtered.empty(2, device=CPU), num_accepted=accepted, places=places)
    right = draw(target_probs(logits, sampling), torch.stack([uniform[0, 3], uniform[1, 1]]))
    assert ids.tolist() == right.tolist() == drafts.tolist()
    assert torch.equal(copies[:, :VOCAB], logits) and not copies[:, VOCAB:].any()


def test_the_draft_ids_of_all_tokens() -> None:
    inverse = inverse_map(torch.tensor([1, 3, 4]), 6)
    assert inverse.tolist() == [-1, 0, -1, 1, 2, -1] and inverse.dtype == torch.int32


@pytest.mark.slow
@pytest.mark.thorough
def test_a_verification_of_few_tokens() -> None:
    """Accepted, rejected and none; q of a head that knows some tokens, in another order of rows."""
    assert_decided(2, VOCAB, 20)


KINDS = [NONE, (0.7, 20, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (0.3, 0, 1.0, 0.1), (2.0, 40, 0.9, 0.05)]


@pytest.mark.parametrize("mapped", [False, True])
def test_keyed_draws_are_the_arg_max_with_noise(mapped: bool) -> None:
    """Of rows in any order, several of a request, with a NaN and a banned token; of a greedy row the arg max."""
    width, params = 3, parameters(KINDS)
    index = torch.randperm(40)[: width * len(KINDS)]
    logits, wide = torch.randn(40, VOCAB) * 2, torch.randint(-(2**62), 2**62, (len(KINDS), width + 2))
    columns, seeds = wide[:, : width + 1], wide[:, :width].flatten()
    logits[:, 7] = BANNED
    tokens = torch.randperm(5 * VOCAB)[:VOCAB].sort().values if mapped else None
    out = torch.full((len(index), 2), -7)
    owner = torch.arange(len(KINDS)).repeat_interleave(width)
    right = perturbed(logits[index], params.rows(owner), seeds, tokens).argmax(1)
    given = {"index": index, "target_ids": tokens, "out": out[:, 1]}
    assert torch.equal(draw_keyed(logits, logits.argmax(1), params, columns, **given), right)
    assert torch.equal(out[:, 1], right if tokens is None else tokens[right]) and bool((out[:, 0] == -7).all())
    assert bool((right != logits[index].argmax(1)).any())
    logits[:, 7] = torch.nan  # of the first two requests, which are sampled
    found = draw_keyed(logits, logits.nan_to_num(-9).argmax(1), params, columns, index=index)
    right = perturbed(logits[index].nan_to_num(BANNED), params.rows(owner), seeds).argmax(1)
    assert torch.equal(found[: 2 * width], right[: 2 * width])


@pytest.mark.parametrize("slots", [1, 2])
def test_keyed_drafts_take_the_noise_of_their_positions(slots: int) -> None:
    """After the accepted drafts of their rows, the last column's where there are no more; ids are replaced in place."""
    rows = len(KINDS)
    logits, seeds = torch.randn(rows * slots, VOCAB) * 2, torch.randint(2**62, (rows, 5))
    accepted, step = torch.tensor([0, 1, 2, 3, 4, 0]), 2
    owner, place = torch.arange(rows).repeat_interleave(slots), torch.arange(slots).repeat(rows)
    own = seeds[owner, (accepted[owner] + step + place).clamp(max=4)]
    right = perturbed(logits, parameters(KINDS).rows(owner), own).argmax(1)
    ids = logits.argmax(1)
    found = draw_keyed(logits, ids, parameters(KINDS), seeds, num_accepted=accepted, step=step, into=ids)
    assert found is ids and torch.equal(ids, right) and bool((right != logits.argmax(1)).any())


def test_noise_of_the_kernel_is_that_of_every_seed() -> None:
    """Flat rows: the winner's noise is near the largest there can be, where a small w must keep its bits."""
    seeds, logits = torch.arange(40), torch.zeros(40, VOCAB)
    found = draw_keyed(logits, logits.argmax(1), parameters([NONE] * 40), seeds[:, None])
    assert torch.equal(found, perturbed(logits, parameters([NONE] * 40), seeds).argmax(1))
