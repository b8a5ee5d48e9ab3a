"""Defects that block-parallel heads had elsewhere, planted: each check passes on the real code and fails on them.

Sampled rounds are simulated by the library's own functions, many rows at once: drafts along a chain, drawn with the
uniforms of `SamplingRound`, verified against a bigram target, whose distribution is then known. The chi-square test of
the tokens has a false alarm of ALPHA; its power against each defect is computed (noncentral chi-square) and is at least
POWER.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import tiny_llama, wrap, wrong_rounds

from attention.runner import GroupRunner
from drafters.loops.base import Chosen
from drafters.loops.block.chains import Independent, Markov, Selector, drafts_along, go_along
from evals.acceptance import metrics
from evals.acceptance.metrics import columns, position_metrics
from specdec.acceptance import judge as judging
from specdec.acceptance.judge import DraftVocab, choose_sampled, judge
from specdec.acceptance.packed import PackedResult
from specdec.execution import sampled
from specdec.execution.sampled import SampledDrafts, decide_sampled
from specdec.ops.draws import Filtered, draw_drafts, filter_rows
from specdec.requests.sampling import SamplingArrays, SamplingParams, SamplingTensors
from specdec.requests.stats import pool
from specdec.rounds.randomness import Role, SamplingRound, position_bits
from specdec.rounds.transfer import DeviceSampling
from tests.drafters.loops.block.test_chains import head_of
from tests.drafters.loops.block.test_rounds import GREEDY, PROMPTS, made
from tests.drafters.test_conformance import oracle_rounds
from tests.drafters.test_keyed_drafts import keyed_as
from tests.evals.acceptance.test_metrics import answer
from tests.sampled_rounds import kernels_by_reference, planted

stats = pytest.importorskip("scipy.stats")

ALPHA, POWER = 1e-6, 0.99
V, H, K, ROWS, FIRST = 6, 4, 2, 100_000, 7
TEMPERATURE = 0.5
SEED = 14


class Simulated:
    """Rows of one round with a head whose slots all have the same logits, about 40 as those of real models."""

    def __init__(self, chain: Any, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.table = 40 + 0.8 * torch.randn(V, V, generator=generator)  # the target's logits after a token
        near = torch.stack([self.table[3], *[self.table.mean(0)] * (K - 1)])
        own = (near + 0.5 * torch.randn(K, V, generator=generator)).to(dtype)
        self.head = head_of(chain.to(dtype) if isinstance(chain, torch.nn.Module) else chain, own[None])
        self.head.logits = lambda x: own.repeat_interleave(len(x) // K, 0)
        self.head.draft_vocab_size = V
        self.x = torch.randn(1, K, H, generator=generator).expand(ROWS, K, H).to(dtype)
        self.bonus = torch.full((ROWS,), 3)
        self.keys = position_bits(np.arange(ROWS, dtype=np.uint64), np.array([1]), Role.TOKEN)  # any numbers

    def round(self, first: int) -> SamplingRound:
        arrays = SamplingArrays.of([SamplingParams(temperature=TEMPERATURE)])
        repeated = SamplingArrays(**{name: np.repeat(own, ROWS) for name, own in vars(arrays).items()})
        return SamplingRound(repeated, self.keys, np.full(ROWS, first), ROWS, ROWS, K)

    def sampling(self) -> DeviceSampling:
        own, before = self.round(FIRST), self.round(FIRST - 1)
        drawn = own.accept_uniforms(K), own.next_uniforms(K + 1), own.draft_uniforms(), before.ahead_uniforms(2 * K)
        arrays = own.arrays
        parts = (arrays.temperature, arrays.top_k, arrays.top_p, arrays.min_p)
        tensors = SamplingTensors(*map(torch.from_numpy, parts), filters=False)
        return DeviceSampling(*map(torch.from_numpy, drawn), tensors=tensors)

    def verified(self, drafts: torch.Tensor) -> torch.Tensor:
        """[R·(K+1), V] logits of the target at the bonus token and after each draft."""
        return self.table[torch.cat([self.bonus[:, None], drafts], 1)].flatten(0, 1)

    def eager(self, choosing: Callable[..., Any] = choose_sampled) -> PackedResult:
        sampling = self.sampling()
        draft = drafts_along(self.head, self.x, self.bonus, K, choosing(sampling, ROWS))
        round_: Any = SimpleNamespace(
            sampling=sampling,
            logit_index=torch.arange(ROWS * (K + 1)).view(ROWS, -1),
            num_drafts=torch.full((ROWS,), K),
        )
        return judge(self.verified(draft.token_ids), round_, draft, DraftVocab(torch.arange(V), V))

    def from_graphs(self) -> PackedResult:
        """The same by what graphs launch, computed by torch."""
        sampling, num_drafts = self.sampling(), torch.full((ROWS,), K)
        loop: Any = SimpleNamespace(drafts=torch.zeros(ROWS, K, dtype=torch.int64))
        with kernels_by_reference():
            own = SampledDrafts(self.head, loop, sampling, V)

            def draft(slot: int, logits: torch.Tensor) -> torch.Tensor:
                own.choose(slot, Chosen(logits.argmax(-1), logits), None if slot else torch.zeros_like(self.bonus))
                return loop.drafts[:, slot]

            go_along(self.head, self.x, self.bonus, K, draft)
            logits, index = self.verified(loop.drafts), torch.arange(ROWS * (K + 1)).view(ROWS, -1)
            greedy = logits.argmax(-1)
            result = PackedResult.pack(torch.zeros_like(self.bonus), greedy[index][:, 0], loop.drafts)
            decide_sampled(logits, greedy, index, num_drafts, sampling, result, own.proposal_of(ROWS, None))
        return result

    def misfit(self, result: PackedResult) -> tuple[float, int]:
        """Chi-square of the tokens after each prefix, and its degrees of freedom."""
        accepted, tokens = result.num_accepted, torch.cat([self.bonus[:, None], result.tokens], 1)
        p = (self.table.double() / TEMPERATURE).softmax(-1)
        total, freedom = 0.0, 0
        for place in range(K + 1):
            rows = tokens[accepted >= place]
            counts = torch.zeros(V, V).index_put((rows[:, place], rows[:, place + 1]), torch.ones(len(rows)), True)
            expected = counts.sum(1, keepdim=True) * p
            used = expected >= 5
            total += float(((counts - expected)[used] ** 2 / expected[used]).sum())
            freedom += int(used.sum() - used.any(1).sum())
        return total, freedom


def power_of(total: float, freedom: int) -> float:
    """The probability of an alarm at ALPHA, for an effect three standard errors smaller than the one found."""
    effect = max(total - freedom - 3 * np.sqrt(2 * freedom + 4 * max(total - freedom, 0.0)), 0.0)
    return float(stats.ncx2.sf(stats.chi2.isf(ALPHA, freedom), freedom, effect))


def chain_of(kind: str) -> Any:
    torch.manual_seed(6)
    made = {"none": Independent, "markov": lambda: Markov(V, V, H, 3), "selector": lambda: Selector(V, H, 3, 4)}[kind]()
    return made.requires_grad_(False) if isinstance(made, torch.nn.Module) else made


def role_as(name: str, role: Role, begins: int = 0) -> Callable[[pytest.MonkeyPatch], None]:
    """Uniforms of one kind come from the stream of another role."""

    def drawn(self: SamplingRound, places: int = K) -> np.ndarray:
        return self._uniforms(np.arange(begins, begins + places), role)

    return lambda patch: patch.setattr(SamplingRound, name, drawn)


def drawn_in_half(sampling: DeviceSampling, rows: int) -> Any:
    """A draft drawn from the logits in bf16, with q of those in float32."""
    right = choose_sampled(sampling, rows)
    return lambda step, logits: (right(step, logits.bfloat16())[0], right(step, logits)[1])


def drawn_colder(sampling: DeviceSampling, rows: int) -> Any:
    """A draft drawn at another temperature than that of its q."""
    colder = replace(sampling, tensors=replace(sampling.tensors, temperature=0.9 * sampling.tensors.temperature))
    right, wrong = choose_sampled(sampling, rows), choose_sampled(colder, rows)
    return lambda step, logits: (wrong(step, logits)[0], right(step, logits)[1])


def kept_in_full(
    logits: torch.Tensor, ids: Any, sampling: Any, uniform: Any, step: int, out: Filtered, **rest: Any
) -> None:
    """The same in rounds from graphs: drawn in bf16, and judged by float32."""
    greedy = ids.clone()
    draw_drafts(logits.bfloat16().float(), ids, sampling, uniform, step, out, **rest)
    rest["places"].logits.copy_(logits)
    filter_rows(logits, greedy, sampling, out)


@pytest.mark.parametrize("way", ["eager", "from_graphs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["none", "markov", "selector"])
def test_drawn_drafts_leave_the_targets_distribution(kind: str, dtype: torch.dtype, way: str) -> None:
    """Also where the head runs in bf16: draw and q come from the same numbers."""
    pytest.importorskip("triton", reason="Triton is not installed")
    rig = Simulated(chain_of(kind), dtype)
    result = getattr(rig, way)()
    shares = [float((result.num_accepted == n).float().mean()) for n in range(K + 1)]
    assert min(shares) > 0.1, "every place is reached, and rejected"
    assert stats.chi2.sf(*rig.misfit(result)) > 1e-3


STREAMS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "recovery from the drafts' stream": ("eager", role_as("next_uniforms", Role.DRAFT)),
    "acceptance from the drafts' stream": ("eager", role_as("accept_uniforms", Role.DRAFT)),
    "recovery from the drafts' stream, graphs": ("from_graphs", role_as("next_uniforms", Role.DRAFT)),
    "the target's noise in the draft": ("eager", role_as("draft_uniforms", Role.RESAMPLE)),
    "the target's noise in the draft, graphs": ("from_graphs", role_as("ahead_uniforms", Role.RESAMPLE, 1)),
}


@pytest.mark.parametrize("kind", ["markov", "selector"])
@pytest.mark.parametrize("name", STREAMS)
def test_one_random_stream_for_two_decisions_is_seen(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    way, plant = STREAMS[name]
    plant(monkeypatch)
    rig = Simulated(chain_of(kind))
    total, freedom = rig.misfit(getattr(rig, way)())
    assert stats.chi2.sf(total, freedom) < ALPHA and power_of(total, freedom) > POWER


@pytest.mark.parametrize("kind", ["none", "markov", "selector"])
@pytest.mark.parametrize("choosing", [drawn_in_half, drawn_colder], ids=["bf16", "temperature"])
def test_a_q_of_other_numbers_than_the_draw_is_seen(choosing: Callable[..., Any], kind: str) -> None:
    rig = Simulated(chain_of(kind))
    total, freedom = rig.misfit(rig.eager(choosing))
    assert stats.chi2.sf(total, freedom) < ALPHA and power_of(total, freedom) > POWER


@pytest.mark.parametrize("kind", ["none", "markov", "selector"])
@pytest.mark.parametrize("name", ["bf16", "temperature"])
def test_a_q_of_other_numbers_is_seen_in_rounds_from_graphs(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    if name == "bf16":
        monkeypatch.setattr(sampled, "draw_drafts", kept_in_full)
    rig = Simulated(chain_of(kind))
    with planted("temperature twice in the draft" if name == "temperature" else ""):
        total, freedom = rig.misfit(rig.from_graphs())
    assert stats.chi2.sf(total, freedom) < ALPHA and power_of(total, freedom) > POWER


def zeroed(wrapped: Any) -> None:
    for layer in wrapped.runners[1].layers:
        layer.keys.zero_()
        layer.values.zero_()


@pytest.mark.parametrize("is_planted", [False, True])
def test_cached_tokens_without_the_heads_keys_show(is_planted: bool) -> None:
    """The target's pages are found, and the head's hold nothing of these tokens."""
    head = made("dspark")
    wrapped = wrap(tiny_llama(), head)
    (first,) = wrapped.generate([PROMPTS[1]], replace(GREEDY, max_new_tokens=12))
    if is_planted:
        zeroed(wrapped)
    prompts = [[*PROMPTS[1][:26], 1, 2], PROMPTS[1] + first.token_ids[:10]]
    completions = wrapped.generate(prompts, replace(GREEDY, max_new_tokens=8))
    assert wrapped.engine_stats.cached_tokens >= 24 + 36
    assert [bool(wrong_rounds(head, c)) for c in completions] == [is_planted] * 2


@pytest.mark.parametrize("is_planted", [False, True])
def test_context_that_a_preemption_took_shows(is_planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests in one batch, one preempted with drafts in flight: planted, it comes back without its context."""
    head = made("dspark")
    wrapped = wrap(tiny_llama(), head, kv_cache_tokens=80, max_num_seqs=2, enable_prefix_caching=False)
    plain, most = GroupRunner.write, 2 * (head.block_size + 1)

    def forgetful(self: GroupRunner, layer: int, key: Any, value: Any, slots: Any) -> None:
        kept = not (is_planted and wrapped.engine_stats.preemptions and len(slots) > most)
        plain(self, layer, key * kept, value * kept, slots)

    monkeypatch.setattr(GroupRunner, "write", forgetful)
    params = replace(GREEDY, max_new_tokens=24)
    together = wrapped.generate([PROMPTS[3], PROMPTS[1]], params)
    lost = [c.stats.preemptions > 0 for c in together]
    monkeypatch.undo()
    alone = [wrap(tiny_llama(), head).generate([c.prompt_token_ids], params)[0] for c in together]
    assert sorted(lost) == [False, True] and [c.token_ids for c in together] == [c.token_ids for c in alone]
    same = [a.drafts == b.drafts for a, b in zip(together, alone, strict=True)]
    assert same == [not (own and is_planted) for own in lost]


@pytest.mark.parametrize("name", ["dflash2", "reduced vocabulary"])
@pytest.mark.parametrize("is_planted", [False, True])
def test_keyed_drafts_have_the_noise_of_their_target_ids(
    is_planted: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the noise of the place among a slot's candidates. The tokens are right all the same."""
    head, target = made(name), tiny_llama()
    params = [SamplingParams(max_new_tokens=16, return_drafts=True, seed=40 + i, temperature=0.7) for i in range(3)]
    right = wrap(target, sampling="keyed").generate(PROMPTS[:3], params)
    if is_planted:
        plain = judging.perturbed

        def by_place(logits: torch.Tensor, sampling: Any, seeds: Any, ids: Any = None) -> torch.Tensor:
            places = None if ids is None else logits.argsort(-1, descending=True).argsort(-1)
            return plain(logits, sampling, seeds, places)

        monkeypatch.setattr(judging, "perturbed", by_place)
    completions = wrap(target, head, sampling="keyed", draft_sampling="probabilistic").generate(PROMPTS[:3], params)
    assert [c.token_ids for c in completions] == [c.token_ids for c in right]
    found = [
        pair
        for prompt, completion, own in zip(PROMPTS, completions, params, strict=False)
        for pair in oracle_rounds(target, head, prompt, completion, by_target_id(own, head))
    ]
    wrong = sum(ours != theirs for ours, theirs in found)
    assert len(found) > 15 and (wrong > 10 if is_planted else not wrong)


def by_target_id(params: SamplingParams, head: Any) -> Any:
    """The choice of the oracle, of a head whose vocabulary may be reduced."""
    over_target = keyed_as(params)

    def choose(position: int, logits: torch.Tensor) -> torch.Tensor:
        spread = torch.full((1, head.spec.vocab_size), -torch.inf).index_copy(1, head.target_ids, logits)
        return (head.target_ids == over_target(position, spread)).nonzero()[0]

    return choose


@pytest.mark.parametrize(("name", "most"), [("dspark", 6), ("dflash", 5), ("dflash2", 5)])
@pytest.mark.parametrize("is_planted", [False, True])
def test_metrics_begin_at_the_first_draft(
    is_planted: bool, name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an anchor-first head slot 0 gives draft 1, of a fill-in head slot 1. Planted: slot 0 is left out."""
    if is_planted:

        def skipping(rounds: Any) -> Any:
            later = (replace(r, drafted=max(r.drafted - 1, 0), accepted=max(r.accepted - 1, 0)) for r in rounds)
            return pool(later)

        monkeypatch.setattr(metrics, "pool", skipping)
    completions = wrap(tiny_llama(), made(name)).generate(PROMPTS[:3], GREEDY)
    leading = list[int]()
    for completion in completions:
        done = 1
        for record, drafts in zip(completion.stats.rounds, completion.drafts, strict=True):
            after = completion.token_ids[done : done + record.emitted]
            equal = [a == b for a, b in zip(drafts, after, strict=False)]
            leading.append([*equal, False].index(False))
            done += record.emitted
    sums = columns([answer([(r.drafted, r.accepted, r.emitted) for c in completions for r in c.stats.rounds])], most)
    found = [float(sums[f"accepted_at_{j + 1}"].sum()) for j in range(most)]
    right = [sum(n > j for n in leading) for j in range(most)]
    assert right[0] > 0 and len(position_metrics(most)["conditional"]) == most
    assert (found == right) == (not is_planted)
