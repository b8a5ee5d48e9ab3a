"""Filters, draws and acceptance of sampled rows, in Triton's interpreter, against their torch reference.

Small parts and tiles, so that rows of a few hundred tokens have several, and lists that overflow in some.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fakes import examples

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

import specdec.ops.draws_kernel
import specdec.ops.filters_kernel
from drafters.vocab import scatter
from specdec.acceptance.accept import SampledInputs, accept_greedy, accept_sampled
from specdec.acceptance.packed import PackedResult
from specdec.ops.draws import DraftPlaces, Filtered, Proposal, accept_drafts, draw_drafts, filter_rows, inverse_map
from specdec.requests.sampling import SamplingTensors
from specdec.requests.target_probs import draw, target_probs
from tests.sampled_rounds import kernels_by_reference, one_token_less

CPU = torch.device("cpu")
FOUR = [(0.8, 0, 0.95, 0.0), (1.0, 40, 0.9, 0.0), (2.0, 0, 1.0, 0.02), (5.0, 7, 0.8, 0.3)]
EDGES = [(0.0, 3, 0.5, 0.1), (1.0, 1, 1.0, 0.0), (1.0, 0, 1e-9, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 9999, 0.5, 1.0)]
EXTREME = [(1e-3, 0, 0.95, 0.0), (100.0, 0, 0.5, 0.0), (100.0, 100, 0.999, 0.99), (0.1, 5, 0.3, 0.5)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have several parts and tiles, and lists overflow where many logits are equal."""
    small = {"_PART": 256, "_SUMS_TILE": 128, "_SHARE": 32, "_PROGRAMS": 4}
    for name, value in small.items():
        monkeypatch.setattr(specdec.ops.filters_kernel, name, value)
    monkeypatch.setattr(specdec.ops.draws_kernel, "_PART", 256)


def parameters(rows: list[tuple[float, int, float, float]]) -> SamplingTensors:
    temperature, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    return SamplingTensors(temperature.float(), top_k.int(), top_p.float(), min_p.float(), filters=True)


def filtered(logits: torch.Tensor, sampling: SamplingTensors) -> Filtered:
    out = Filtered(torch.full((len(logits), 4), -7.0))
    filter_rows(logits, logits.float().argmax(-1), sampling, out)
    return out


def check(logits: torch.Tensor, sampling: SamplingTensors) -> None:
    """The filtered distribution of every sampled row is the reference's, or that of a top_p within rounding of it."""
    out = filtered(logits, sampling)
    sampled = sampling.temperature > 0
    assert (out.stats[~sampled] == -7).all()
    got = out.probs(logits, sampling.temperature, sampling.min_p)
    top_p = sampling.top_p
    near = [torch.where(top_p < 1, top_p * (1 + by), top_p) for by in (0, 1e-5, -1e-5)]
    errors = torch.stack([(got - target_probs(logits, replace(sampling, top_p=p))).abs().sum(1) for p in near])
    finite = torch.where(logits.isfinite(), logits.float(), 0)
    rounding = 1e-5 + 4e-7 * finite.abs().amax(1) / sampling.temperature  # the reference divides before it subtracts
    assert (errors.amin(0)[sampled] <= rounding[sampled]).all()


KINDS = ("plain", "few values", "banned", "equal", "wide", "signed zeros")


def make(kind: str, rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    logits = torch.randn(rows, vocab) * 2
    if kind == "few values":
        logits = torch.randint(0, 4, (rows, vocab)).float()
    elif kind == "banned":
        logits[torch.rand(rows, vocab) < 0.7] = -torch.inf
        logits[:, 3] = 1.0
    elif kind == "equal":
        logits = torch.full((rows, vocab), -0.5)
    elif kind == "wide":
        logits *= 100
    elif kind == "signed zeros":
        logits = torch.where(torch.rand(rows, vocab) < 0.5, 0.0, -0.0)
    return logits.to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k if k == "banned" else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
@pytest.mark.cases(1)
def test_filters(kind: str) -> None:
    """Every kind of logits meets every third row of parameters, the plain ones all of them."""
    every = [*EDGES, *FOUR, *EXTREME]
    rows = every if kind == "plain" else every[KINDS.index(kind) % 3 :: 3]
    check(make(kind, len(rows), 600, torch.float16), parameters(rows))
    if kind in KINDS[:3]:
        check(make(kind, len(rows), 7, torch.float32), parameters(rows))


def test_a_long_row() -> None:
    """Many parts, and a short list of what remains."""
    check(make("plain", 1, 3000, torch.float32), parameters(FOUR[1:2]))


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 4), (0.25, 2), (0.75, 6), (0.125, 1), (0.126, 2), (1e-30, 1)])
def test_the_lowest_indices_of_equal_logits_go_first(top_p: float, kept: int) -> None:
    logits, sampling = torch.full((1, 300), -30.0), parameters([(1.0, 0, top_p, 0.0)])
    ties = torch.tensor([5, 6, 70, 100, 255, 256, 257, 299])
    logits[0, ties] = 2.0
    got = filtered(logits, sampling).probs(logits, sampling.temperature, sampling.min_p)
    assert got[0].nonzero()[:, 0].tolist() == ties[-kept:].tolist()
    assert target_probs(logits, sampling)[0].nonzero()[:, 0].tolist() == ties[-kept:].tolist()


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from([-3.0, -1.0, 0.0, 1.0, 2.5]), min_size=1, max_size=12),
    st.sampled_from([0.3, 1.0, 4.0]),
    st.integers(0, 12),
    st.sampled_from([0.05, 0.4, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1, 0.6]),
)
def test_any_short_row(row: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    if top_p < 1:  # away from the boundary of exact ties
        top_p += 0.00137
    check(torch.tensor([row]), parameters([(temperature, top_k, top_p, min_p)]))


@pytest.mark.slow
def test_bits_do_not_depend_on_the_batch() -> None:
    """Alone, in a batch in another order, as rows of a wider matrix."""
    sampling = parameters(FOUR)
    wide = make("plain", 4, 700, torch.float16)
    logits = wide[:, 50:650]
    together = filtered(logits, sampling).stats
    for row in (1, 3):
        alone = filtered(logits[row : row + 1].clone(), sampling.rows(torch.tensor([row]))).stats
        assert torch.equal(alone[0], together[row])
    order = torch.tensor([3, 1])
    out = Filtered.empty(2, device=CPU)
    peaks = logits.float().argmax(-1)
    filter_rows(logits, peaks, sampling.rows(order), out, index=order)
    assert torch.equal(out.stats, together[order])


class Round:
    """A verification of J rows with n drafts each, drawn by a head that knows `known` of the target's tokens."""

    def __init__(self, rows: list[tuple[float, int, float, float]], n: int, vocab: int, draft_vocab: int) -> None:
        count, self.n, self.vocab = len(rows), n, vocab
        self.sampling = parameters(rows)
        self.known = torch.randperm(vocab)[:draft_vocab].sort().values
        self.head_logits = torch.randn(count + 2, n, draft_vocab) * 2
        self.logits = torch.randn(count * (n + 1), vocab)
        self.logits[:, self.known] += 2.0
        self.index = torch.randperm(count * (n + 1)).view(count, n + 1)
        self.sources = torch.randperm(count + 2)[:count]
        for row, source in enumerate(self.sources.tolist()):  # the head knows the target's logits, roughly
            own = self.logits[self.index[row, :n]][:, self.known]
            self.head_logits[source] = own + torch.randn_like(own) * 0.7
        self.owners = torch.zeros(count + 2, dtype=torch.long)
        self.owners[self.sources] = torch.arange(count)
        self.num_drafts = torch.randint(0, n + 1, (count,))
        self.num_drafts[::2] = n

    def draft(self) -> tuple[torch.Tensor, Filtered, torch.Tensor]:
        """Drafts [D, n] in the draft vocabulary by the kernels, their stats, and q [D, n, Vd] of the reference."""
        of_row = self.sampling.rows(self.owners)
        out = Filtered.empty(len(self.owners), self.n, device=CPU)
        ids = self.head_logits.argmax(-1)
        verdict = torch.randint(0, 2, (len(ids), 2 * self.n + 2))
        uniform = torch.rand(len(ids), self.n + 2)
        q = torch.stack([target_probs(self.head_logits[:, k], of_row) for k in range(self.n)], 1)
        for k in range(self.n):
            at = (verdict[:, 0] + k)[:, None]
            right = draw(q[:, k], uniform.gather(1, at)[:, 0])
            inputs = (self.head_logits[:, k], ids[:, k], of_row, uniform, k, out.step(k))
            draw_drafts(*inputs, num_accepted=verdict[:, 0])
            assert torch.equal(ids[:, k], right)
        return ids, out, q

    def packed(self, drafts: torch.Tensor) -> torch.Tensor:
        greedy = accept_greedy(drafts, self.num_drafts, self.logits.argmax(-1)[self.index])
        return PackedResult.pack(greedy.num_accepted, greedy.next_token, drafts).packed

    def filtered(self) -> Filtered:
        flat = self.index.flatten()
        out = Filtered.empty(len(flat), device=CPU)
        filter_rows(self.logits, self.logits.argmax(-1), self.sampling, out, index=flat)
        return out

    def probs(self) -> torch.Tensor:
        owner = torch.arange(len(self.index)).repeat_interleave(self.n + 1)
        return target_probs(self.logits[self.index.flatten()], self.sampling.rows(owner)).view(*self.index.shape, -1)


@pytest.mark.slow
@pytest.mark.parametrize("n", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.cases(1)
def test_acceptance(n: int) -> None:
    """One-hot q, the head's, and both in one batch; greedy rows keep their verdict."""
    assert_decided(n, 300, 90)


def assert_decided(n: int, vocab: int, draft_vocab: int) -> None:
    """By the kernels as by their reference: rows with n drafts each of a head that knows `draft_vocab` tokens."""
    case = Round([FOUR[0], EDGES[0], FOUR[1], FOUR[3]], n, vocab, draft_vocab)
    head = "none"
    stats_of_p, p = case.filtered(), case.probs()
    if n:
        ids, stats_of_q, q = case.draft()
        drafts, head = case.known[ids[case.sources]], "mixed"
    else:
        drafts = torch.zeros(len(case.index), 0, dtype=torch.long)
    for mode in ("none", head):
        proposal, spread, sources = None, None, case.sources.clone()
        if mode == "mixed":
            sources[2] = -1
            spread = scatter(q[case.sources], case.known, case.vocab)
            spread[2] = torch.nn.functional.one_hot(drafts[2], case.vocab).float()
            proposal = Proposal(case.head_logits, stats_of_q, inverse_map(case.known, case.vocab), sources)
        for _ in range(2):
            accept, after = torch.rand(len(drafts), n + 2)[:, :n], torch.rand(len(drafts), n + 1)
            right = accept_sampled(drafts, case.num_drafts, SampledInputs(p, spread, accept, after))
            got = case.packed(drafts)
            inputs = (case.logits, case.index, stats_of_p, case.sampling, case.num_drafts, accept, after)
            accept_drafts(*inputs, got, proposal)
            assert torch.equal(got, PackedResult.pack(right.num_accepted, right.next_token, drafts).packed)


def decided(case: Round) -> list[torch.Tensor]:
    """What the kernels, or what stands for them, make of a verification: drafts, p, q and the result."""
    torch.manual_seed(3)
    ids, of_q, _ = case.draft()
    of_p, drafts, packed = case.filtered(), case.known[ids[case.sources]], []
    sources = case.sources.clone()
    sources[2] = -1
    for proposal in (None, Proposal(case.head_logits, of_q, inverse_map(case.known, case.vocab), sources)):
        packed.append(case.packed(drafts))
        uniforms = torch.rand(len(drafts), case.n + 2)[:, : case.n], torch.rand(len(drafts), case.n + 1)
        accept_drafts(case.logits, case.index, of_p, case.sampling, case.num_drafts, *uniforms, packed[-1], proposal)
    rows = (case.sampling.temperature > 0).nonzero()[:, 0]  # the stats of other rows are undefined
    own = case.sampling.rows(rows)
    p = [
        Filtered(of_p.stats.view(-1, case.n + 1, 4)[rows, k]).probs(
            case.logits[case.index[rows, k]], own.temperature, own.min_p
        )
        for k in range(case.n + 1)
    ]
    q = [
        Filtered(of_q.stats[case.sources[rows], k]).probs(
            case.head_logits[case.sources[rows], k], own.temperature, own.min_p
        )
        for k in range(case.n)
    ]
    return [ids, *p, *q, *packed]


@pytest.mark.slow
@pytest.mark.thorough
def test_what_stands_for_the_kernels_in_rounds_from_graphs_is_what_they_do() -> None:
    """`tests.sampled_rounds.kernels_by_reference`."""
    case = Round([FOUR[0], EDGES[0], FOUR[1], FOUR[3]], 2, 300, 90)
    ours = decided(case)
    with kernels_by_reference():
        theirs = decided(case)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, atol=1e-6) if one.is_floating_point() else torch.equal(one, other)


@pytest.mark.thorough
def test_the_filter_that_distribution_tests_plant_keeps_one_token_less() -> None:
    """On a GPU they plant it over the kernels, which say otherwise than the reference where ties begin."""
    sampling = parameters([(6.0, 6, 0.9, 0.0), (1.0, 5, 1.0, 0.0), (2.0, 0, 0.8, 0.0)])
    for kind in ("plain", "few values"):
        logits, right = make(kind, 3, 600, torch.float16), Filtered.empty(3, device=CPU)
        less = Filtered.empty(3, device=CPU)
        filter_rows(logits, logits.float().argmax(-1), sampling, right)
        one_token_less(logits, logits.float().argmax(-1), sampling, less)
        p, q = (each.probs(logits, sampling.temperature, sampling.min_p) for each in (right, less))
        assert torch.equal((q > 0).sum(1), (p > 0).sum(1) - 1) and not (q > 0)[p == 0].any()
        assert torch.allclose(q.sum(1), torch.ones(3), atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.cases(1)
def test_what_stands_beside_the_drafts_of_sampled_rows(mapped: bool) -> None:
    """Logits, drafts in the target's vocabulary and accepted counts; those of greedy rows stay what they are."""
    sampling, known = parameters([FOUR[0], EDGES[0], EDGES[3], FOUR[1]]), torch.randperm(900)[:300].sort().values
    logits, uniform, accepted = torch.randn(4, 300).half(), torch.rand(4, 5), torch.tensor([1, 0, 2, 0])
    logits[2, 7] = torch.nan
    copies, drafts, counts = torch.zeros(4, 2, 320).half(), torch.full((4, 3), -1), torch.full((4,), -1)
    ids, out = logits.nan_to_num(-9).argmax(-1), Filtered.empty(4, device=CPU)
    places = DraftPlaces(copies[:, 1, :300], drafts[:, 1], known if mapped else None, counts)
    draw_drafts(
        logits, ids, sampling, uniform, 2, out, num_accepted=torch.stack([accepted] * 2, 1)[:, 1], places=places
    )
    on = torch.tensor([0, 2, 3])
    assert torch.equal(copies[on, 1, :300], logits[on].nan_to_num(-torch.inf)) and not copies[1].any()
    assert not copies[:, 0].any() and not copies[:, 1, 300:].any()
    assert torch.equal(drafts[on, 1], known[ids[on]] if mapped else ids[on])
    assert (drafts[1] == -1).all() and (drafts[:, ::2] == -1).all()
    assert counts.tolist() == [1, -1, 2, 0]
    alone = logits.nan_to_num(-9).argmax(-1)
    draw_drafts(logits, alone, sampling, uniform, 2, Filtered.empty(4, device=CPU), num_accepted=accepted)
    assert torch.equal(ids, alone)


def test_no_residual_mass_draws_from_p() -> None:
    """q = p for all but a rounding, and the draft is refused all the same: u·q = p is no acceptance."""
    logits, sampling = torch.full((2, 4), -torch.inf), parameters([(1.0, 0, 1.0, 0.0)])
    logits[:, [1, 2]] = 0.0
    stats_of_p = Filtered.empty(2, device=CPU)
    filter_rows(logits, torch.tensor([1, 1]), sampling, stats_of_p)
    everything = torch.arange(4).int()
    proposal = Proposal(logits[None, :1], Filtered(stats_of_p.stats[None, :1]), everything, torch.tensor([0]))
    for uniform, token in ((0.2, 1), (0.7, 2)):
        packed = torch.tensor([[1, 1, 0, 1]])
        ones = torch.ones(1, 1)
        after = torch.full((1, 2), uniform)
        accept_drafts(
            logits, torch.tensor([[0, 1]]), stats_of_p, sampling, torch.tensor([1]), ones, after, packed, proposal
        )
        assert packed.tolist() == [[0, token, 0, 1]]


ANYTHING = -(2**40)
"""A number that a greedy row may have where a sampled one has a place; what is loaded there is in no tensor."""
MIXED = parameters([(0.8, 0, 0.95, 0.0), (0.0, 0, 1.0, 0.0), (1.0, 40, 0.9, 0.0), (0.0, 3, 0.5, 0.1)])


@pytest.mark.thorough
def test_of_greedy_rows_nothing_but_the_parameters_is_loaded() -> None:
    """Their index, largest logit, sources and counts may be any number, and the last ones missing."""
    logits = torch.randn(4, 600)
    right = filtered(logits, MIXED).stats
    peaks = torch.where(MIXED.temperature > 0, logits.argmax(-1), ANYTHING)
    for index in (None, torch.where(MIXED.temperature > 0, torch.arange(4), ANYTHING)):
        out = Filtered(torch.full((4, 4), -7.0))
        filter_rows(logits, peaks, MIXED, out, index=index)
        assert torch.equal(out.stats, right)
    ids, accepted, of_q = peaks.clone(), torch.tensor([2, ANYTHING, 1]), Filtered.empty(4, device=CPU)
    draw_drafts(logits, ids, MIXED, torch.rand(3, 5), 1, of_q, num_accepted=accepted)
    assert ids[1] == ids[3] == ANYTHING and torch.equal(of_q.stats[::2], right[::2])

    index, drafts = torch.arange(4)[:, None].repeat(1, 3), torch.randint(600, (4, 2))
    inverse, head = torch.arange(600).int(), Filtered(right[:, None].repeat(1, 2, 1))
    uniforms, found = torch.rand(4, 3), list[torch.Tensor]()
    for there, number in (((4, 1), 0), ((3, ANYTHING), ANYTHING)):
        rows, greedy = there[0], MIXED.temperature == 0
        packed = torch.cat([torch.full((4, 4), 9), drafts], 1)
        sources, count = torch.arange(4), torch.full((4,), 2)
        places = torch.where(greedy[:, None], number, index)
        sources[greedy], count[greedy] = number, number
        proposal = Proposal(logits[:, None].expand(4, 2, 600), head, inverse, sources)
        of_p = Filtered(right.repeat_interleave(3, 0))
        accept_drafts(logits, places, of_p, MIXED, count, uniforms[:rows, :2], uniforms[:rows], packed, proposal)
        found.append(packed)
    assert torch.equal(*found) and torch.equal(found[0][1::2, :4], torch.full((2, 4), 9))


ROWS, VOCAB = 200, 6
SETTING = (1.3, 5, 0.97, 0.05)
TARGET, HEAD, KNOWN = [0.9, -1.0, 1.4, -0.6, -0.8, -5.0], [0.2, 0.2, 0.9, 3.3], [0, 1, 3, 4]


def filters_of_one_row(
    logits: torch.Tensor, peaks: torch.Tensor, parameters: tuple[torch.Tensor, ...], stats: torch.Tensor, *rest: Any
) -> None:
    """`launch_filters` of equal rows: what the interpreter computes for one is every row's."""
    rest[-1].zero_()
    one = torch.empty(1, 4)
    specdec.ops.filters_kernel.launch_filters(logits[:1], peaks[:1], tuple(p[:1] for p in parameters), one, None)
    stats.copy_(one)


class Emission:
    """ROWS rows with the same p and q and one draft each."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.sampling, self.known = parameters([SETTING] * ROWS), torch.tensor(KNOWN)
        self.logits, self.head_logits = torch.tensor([TARGET]), torch.tensor(HEAD).expand(ROWS, 1, 4)
        self.uniforms, self.ids = torch.rand(ROWS, 3), torch.full((ROWS,), 3)
        self.of_q = Filtered.empty(ROWS, 1, device=CPU)
        inputs = (self.head_logits[:, 0], self.ids, self.sampling, self.uniforms[:, :1], 0, self.of_q.step(0))
        with patch.object(specdec.ops.draws_kernel, "launch_filters", filters_of_one_row):
            draw_drafts(*inputs)
        one = self.sampling.rows(torch.tensor([0]))
        self.of_p = filtered(self.logits, one).stats.repeat(2 * ROWS, 1)
        self.p = target_probs(self.logits, one)[0].double()

    def p_value(self, defect: str, one_hot: bool = False) -> float:
        """Chi-square of the first emitted token against p; a token that p excludes decides alone."""
        of_p, of_q, sampling, uniforms = self.of_p.clone(), self.of_q.stats.clone(), self.sampling, self.uniforms
        greedy = one_hot or defect == "q of a greedy draft"
        drafts = torch.full((ROWS, 1), 1) if greedy else self.known[self.ids][:, None]
        if defect == "q of another step":
            of_q[:, :, 3] *= 3
        if defect == "filters forgotten":
            total = float(((self.logits - TARGET[2]) / SETTING[0]).exp().sum())
            of_p[:, 1:] = torch.tensor([-torch.inf, 0, total])
            sampling = replace(sampling, min_p=torch.zeros(ROWS))
        proposal = Proposal(self.head_logits, Filtered(of_q), inverse_map(self.known, VOCAB), torch.arange(ROWS))
        packed = PackedResult.pack(torch.zeros(ROWS, dtype=torch.long), drafts[:, 0], drafts).packed
        after = uniforms[:, :1] if defect == "the draft's uniform again" else uniforms[:, 2:]
        accept_drafts(
            self.logits,
            torch.zeros(ROWS, 2, dtype=torch.long),
            Filtered(of_p),
            sampling,
            torch.ones(ROWS, dtype=torch.long),
            uniforms[:, 1:2],
            after.repeat(1, 2),
            packed,
            None if one_hot else proposal,
        )
        counts, possible = packed[:, 1].bincount(minlength=VOCAB), self.p > 0
        if counts[~possible].any():
            return 0.0
        return float(stats.chisquare(counts[possible], (self.p / self.p.sum())[possible] * ROWS).pvalue)


@pytest.fixture(scope="module")
def emission() -> Emission:
    return Emission()


@pytest.mark.slow
@pytest.mark.parametrize("one_hot", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_emitted_tokens_have_the_targets_distribution(one_hot: bool, emission: Emission) -> None:
    assert emission.p_value("", one_hot) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize(
    "defect",
    ["filters forgotten", "the draft's uniform again", "q of a greedy draft", "q of another step"],
)
def test_planted_defects_are_seen(defect: str, emission: Emission) -> None:
    assert emission.p_value(defect) < 1e-4
