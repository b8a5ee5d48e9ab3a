"""`min_confidence`: a verification ends before the first draft of which the head is not confident.

Whether draft k is verified may depend on the drafts before it, never on itself: else sampled tokens come out of another
distribution. Two defects are planted, a decision by x_k and one by c_(k+1); both show in the numbers of drafts and in
the distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fakes import free_everywhere, hf_greedy, table_head, tiny_llama, wrap
from torch import Tensor, nn

from drafters.base import FINAL_NORM
from drafters.block.head import BlockParallelHead
from drafters.loops.base import LoopSize
from drafters.loops.block.chains import drafts_along
from drafters.oracle import block_drafts, most_probable
from specdec.acceptance.judge import DraftVocab, choose_sampled, judge
from specdec.acceptance.packed import PackedResult
from specdec.errors import InvalidInputError
from specdec.loading import parts
from specdec.options import LoadOptions
from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import pool_requests
from specdec.wrapped.target import Target
from tests.drafters.loops.block import test_planted
from tests.drafters.loops.block.test_rounds import GREEDY, PROMPTS, TIGHT, made

stats = pytest.importorskip("scipy.stats")
LEAST = 0.5
MIXED = ("confidence", "reduced vocabulary", "outputs alone", "fill-in")


def rating(name: str) -> Any:
    """A head with scores on both sides of LEAST."""
    if name == "outputs alone":
        return made("rnn", confidence="outputs")
    if name == "fill-in":
        return made("fill-in with a chain", confidence="outputs and tokens")
    return made(name)


def by_hand(head: Any, least: float, ids: Tensor, aux: Tensor, most: int) -> list[int]:
    """The drafts of a round that are verified, from the head without a cache."""
    outputs: list[Tensor] = []

    def read(x: Tensor) -> Tensor:
        outputs.append(x)
        return BlockParallelHead.logits(head, x)

    with patch.object(head, "logits", read):
        drafts = block_drafts(head, ids, aux, most, most_probable)
    weight, bias = head.confidence_head.state_dict().values()
    before = int(ids[-1])
    for place, (x, token) in enumerate(zip(outputs[0], drafts, strict=True)):
        w1 = [head.markov_head.markov_w1.weight[before]] if head.spec.confidence == "outputs and tokens" else []
        if torch.sigmoid(torch.cat([x, *w1]) @ weight[0] + bias) < least:
            return drafts[:place]
        before = token
    return drafts


def wrong_counts(wrapped: Any, head: Any, least: float, completions: Any, new: int = 20) -> tuple[int, list[int]]:
    """Rounds whose drafts are not those by hand, and how many drafts each round had."""
    wrong, counts, target = 0, [], tiny_llama()
    for completion in completions:
        prompt = completion.prompt_token_ids
        ids, done = torch.tensor(prompt + completion.token_ids), 1
        with torch.no_grad():
            states = target(ids[None], output_hidden_states=True, use_cache=False).hidden_states
            layers = [states[-1 if t == FINAL_NORM else t][0] for t in head.aux_layers]
            aux = torch.cat(layers, -1)
            for record, drafts in zip(completion.stats.rounds, completion.drafts, strict=True):
                bonus = len(prompt) + done - 1
                most = min(wrapped.num_speculative_tokens, new - done - 1)
                if most > 0:
                    wrong += by_hand(head, least, ids[: bonus + 1], aux[:bonus], most) != list(drafts)
                    counts.append(len(drafts))
                done += record.emitted
    return wrong, counts


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("options", [{}, TIGHT], ids=["room", "tight"])
def test_a_verification_ends_before_the_first_doubtful_draft(name: str, options: dict[str, int]) -> None:
    """Greedy tokens stay; drafts that are cut are in no statistic; preempted requests draft as alone."""
    head = rating(name)
    wrapped = wrap(tiny_llama(), head, min_confidence=LEAST, **options)
    completions = wrapped.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in completions] == [hf_greedy(p, 20) for p in PROMPTS]
    wrong, counts = wrong_counts(wrapped, head, LEAST, completions)
    assert not wrong and len({*counts}) > 3 and 0 in counts
    pooled = pool_requests([c.stats for c in completions])
    assert pooled.drafted == sum(len(d) for c in completions for d in c.drafts)
    assert wrapped.engine_stats.early_reads > 10 and (wrapped.engine_stats.preemptions > 0) == bool(options)
    assert free_everywhere(wrapped)


def test_the_target_reads_no_token_that_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the prompt, then in each round the bonus token and the drafts that are left, of all rows together."""
    wrapped, read, plain = wrap(tiny_llama(), rating("confidence"), min_confidence=LEAST), list[int](), Target.forward

    def counted(self: Target, token_ids: Tensor, *rest: Any) -> Any:
        read.append(len(token_ids))
        return plain(self, token_ids, *rest)

    monkeypatch.setattr(Target, "forward", counted)
    completions = wrapped.generate(PROMPTS[:3], GREEDY)
    rounds = [r for c in completions for r in c.stats.rounds]
    assert sum(read) == sum(map(len, PROMPTS[:3])) + sum(1 + r.drafted for r in rounds)


@pytest.mark.parametrize("name", ["confidence", "reduced vocabulary"])
def test_keyed_tokens_are_those_without_drafts(name: str) -> None:
    params = [SamplingParams(max_new_tokens=16, seed=40 + i, temperature=0.5 * i) for i in range(4)]
    right = wrap(tiny_llama(), sampling="keyed").generate(PROMPTS[:4], params)
    wrapped = wrap(tiny_llama(), rating(name), sampling="keyed", min_confidence=LEAST)
    completions = wrapped.generate(PROMPTS[:4], params)
    assert [c.token_ids for c in completions] == [c.token_ids for c in right]
    assert len({r.drafted for c in completions for r in c.stats.rounds}) > 3


def test_sampled_rounds_do_not_depend_on_the_batch() -> None:
    """Rows that are cut change their places: probabilities and uniforms of drafts go along."""
    wrapped = wrap(tiny_llama(), rating("confidence"), min_confidence=LEAST)
    params = [replace(GREEDY, seed=40 + i, temperature=0.4 * i) for i in range(4)]
    for one, own in zip(wrapped.generate(PROMPTS[:4], params), params, strict=True):
        (alone,) = wrap(tiny_llama(), rating("confidence"), min_confidence=LEAST).generate([one.prompt_token_ids], own)
        assert (one.token_ids, one.drafts, one.stats.rounds) == (alone.token_ids, alone.drafts, alone.stats.rounds)


@pytest.mark.parametrize("least", [0.0, 0.9999])
def test_all_or_no_drafts_may_be_left(least: float) -> None:
    head = rating("confidence")
    head.confidence_head["proj"].weight.mul_(0.1)
    plain, cut = (wrap(tiny_llama(), head, **own).generate(PROMPTS, GREEDY) for own in ({}, {"min_confidence": least}))
    assert [c.token_ids for c in cut] == [c.token_ids for c in plain]
    if least:
        assert {r.drafted for c in cut for r in c.stats.rounds} == {0}
    else:
        assert [c.drafts for c in cut] == [c.drafts for c in plain]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dspark", {}, "min_confidence=0.5: only DSpark heads with a confidence head"),
        ("eagle3", {}, "min_confidence=0.5: only DSpark heads"),
        (None, {}, "min_confidence=0.5: only DSpark heads"),
        ("confidence", {"num_speculative_tokens": 0}, "min_confidence=0.5: num_speculative_tokens=0 leaves no drafts"),
        ("lookup", {}, "min_confidence=0.5: drafts by lookup have no confidence"),
        ("confidence", {"min_confidence": 1.0}, "min_confidence=1.0: allowed is 0 or more, less than 1"),
        ("confidence", {"min_confidence": -0.1}, "min_confidence=-0.1: allowed"),
        ("confidence", {"min_confidence": "high"}, "min_confidence='high'.*allowed"),
    ],
)
def test_where_it_has_no_effect_it_is_refused_by_name(name: str | None, options: dict[str, Any], message: str) -> None:
    draft: Any = None if name is None else table_head(tiny_llama()) if name == "eagle3" else None
    if name in ("confidence", "dspark"):
        draft = made(name)
    if name == "lookup":
        draft = [made("confidence"), "lookup"]
    with pytest.raises(InvalidInputError, match=message):
        wrap(tiny_llama(), draft, **{"min_confidence": LEAST, **options})


def test_graphs_and_several_processes_are_refused_by_name() -> None:
    head, config = rating("confidence"), SimpleNamespace(max_num_seqs=2, num_speculative_tokens=3)
    options = LoadOptions(min_confidence=LEAST, tensor_parallel_size=2)
    with patch.object(parts, "loop_limits", lambda _: LoopSize(drafts=3)):
        for graphs, message in (
            (True, "CUDA graphs verify whole blocks, .*; give cuda_graphs=False"),
            (False, "tensor_parallel_size=1"),
        ):
            with pytest.raises(InvalidInputError, match=message):
                parts.chosen_loop(head, config, options, graphs, False)  # type: ignore[arg-type]


def by_the_draft(head: Any, least: float, x: Tensor, bonus: Tensor, drafts: Tensor) -> Tensor:
    """Planted: whether draft k is verified is decided by x_k."""
    own = x[:, head.first_slot :][:, : drafts.shape[1]]
    return (head.confidence_logits(own, drafts).sigmoid() >= least).cumprod(1).sum(1)


def by_the_next(head: Any, least: float, x: Tensor, bonus: Tensor, drafts: Tensor) -> Tensor:
    """Planted: it is decided by c_(k+1), the last one by its own."""
    own = x[:, head.first_slot :][:, : drafts.shape[1]]
    odds = head.confidence_logits(own, torch.cat((bonus[:, None], drafts[:, :-1]), 1))
    return (torch.cat((odds[:, 1:], odds[:, -1:]), 1).sigmoid() >= least).cumprod(1).sum(1)


PLANTED = pytest.mark.parametrize("defect", [by_the_draft, by_the_next])


@PLANTED
def test_decisions_by_the_draft_or_the_next_one_show(
    defect: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockParallelHead, "num_confident", defect)
    head = rating("confidence")
    wrapped = wrap(tiny_llama(), head, min_confidence=LEAST)
    completions = wrapped.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in completions] == [hf_greedy(p, 20) for p in PROMPTS]
    assert wrong_counts(wrapped, head, LEAST, completions)[0] > 5


class Simulated(test_planted.Simulated):
    """With a confidence head that is sure of draft 1, and of draft 2 after half of the tokens."""

    def __init__(self) -> None:
        super().__init__(test_planted.chain_of("markov"))
        head: Any = self.head
        head.spec = SimpleNamespace(confidence="outputs and tokens", confidence_temperatures=())
        head.markov_head = head.chain
        proj = nn.Linear(test_planted.H + 3, 1).requires_grad_(False)
        head.confidence_head = {"proj": proj}
        head.confidence_logits = MethodType(BlockParallelHead.confidence_logits, head)
        proj.weight[:, : test_planted.H] = 0  # by the token before alone, and more so after the bonus token
        scores = head.confidence_logits(self.x[:1].expand(test_planted.V, -1, -1)[:, 0], torch.arange(test_planted.V))
        if scores[3] < scores.median():
            proj.weight.neg_()
            proj.bias.neg_()
            scores = -scores
        self.least = float(scores.sort().values[2:4].mean().sigmoid())

    def cut(self, decide: Callable[..., Tensor]) -> tuple[PackedResult, Tensor]:
        """The round, and how many drafts of each row were verified."""
        sampling = self.sampling()
        rows, drafts = test_planted.ROWS, test_planted.K
        draft = drafts_along(self.head, self.x, self.bonus, drafts, choose_sampled(sampling, rows))
        kept = decide(self.head, self.least, self.x, self.bonus, draft.token_ids)
        index = torch.arange(rows * (drafts + 1)).view(rows, -1)
        round_: Any = SimpleNamespace(sampling=sampling, logit_index=index, num_drafts=kept)
        vocab = DraftVocab(torch.arange(test_planted.V), test_planted.V)
        return judge(self.verified(draft.token_ids), round_, draft, vocab), kept


def test_verifications_that_end_early_leave_the_targets_distribution() -> None:
    rig = Simulated()
    result, kept = rig.cut(BlockParallelHead.num_confident)
    assert 0.1 < float((kept == 1).float().mean()) < 0.9 and {*kept.tolist()} == {1, 2}
    assert stats.chi2.sf(*rig.misfit(result)) > 1e-3


@PLANTED
def test_planted_decisions_change_the_distribution(defect: Callable[..., Tensor]) -> None:
    """At a false alarm of 1e-6 each is found with a probability of 0.99 or more."""
    rig = Simulated()
    total, freedom = rig.misfit(rig.cut(defect)[0])
    assert stats.chi2.sf(total, freedom) < test_planted.ALPHA
    assert test_planted.power_of(total, freedom) > test_planted.POWER
