"""Rounds with block-parallel heads: the target's own tokens, and the drafts that the head makes without a cache."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from fakes import (
    CPU,
    TINY,
    VOCAB,
    backend_of_ours,
    free_everywhere,
    hf_greedy,
    random_prompts,
    scheduler_of,
    tiny_llama,
    wrap,
    wrong_rounds,
)
from transformers import LlamaConfig, LlamaForCausalLM

from attention.backends.flex import FlexBackend
from attention.cache.pages import BlockTables
from attention.runner import GroupRunner
from drafters.base import FINAL_NORM, BlockHead, Head
from drafters.block.head import BlockConvolution
from drafters.loops.base import DraftInput, DraftLoop, LoopSize, SharesPages
from drafters.loops.block import loop as block_loop
from drafters.loops.block.inputs import HostBlock
from drafters.oracle import block_drafts
from specdec.acceptance import judge as judging
from specdec.acceptance.accept import VerificationResult
from specdec.errors import InvalidInputError, InvariantError, UnsupportedAttentionError
from specdec.loading import assembly
from specdec.requests.sampling import SamplingParams
from specdec.selftest.twin import TwinReport, enlarge
from tests.block_heads import DFLASH, DFLASH2, DSPARK, block_head, write_head
from tests.drafters.test_conformance import oracle_rounds
from tests.drafters.test_keyed_drafts import keyed_as
from tests.sampled_rounds import drawn_as
from tests.specdec.extensions.handoff.test_transfers import PARAMS as MOVED_PARAMS
from tests.specdec.extensions.handoff.test_transfers import PROMPTS as MOVED
from tests.specdec.extensions.handoff.test_transfers import SIZES as MOVED_SIZES
from tests.specdec.extensions.handoff.test_transfers import lived, moved

PROMPTS = random_prompts((5, 33, 1, 17, 60, 9))
GREEDY = SamplingParams(max_new_tokens=20, return_drafts=True)
TIGHT = {"kv_cache_tokens": 96, "max_num_seqs": 5, "max_num_batched_tokens": 36}
WINDOWS = {"window": 3, "windowed_layers": (0,)}
HEADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dflash": (DFLASH, {}),
    "dspark": (DSPARK, {}),
    "dflash2": (DFLASH2, WINDOWS | {"own_embed": True, "selector_rank": VOCAB, "selector_top_k": 32}),
    "gated": (DSPARK, {"markov": "gated"}),
    "rnn": (DSPARK, {"markov": "rnn", "markov_rank": 6}),
    "window": (DSPARK, WINDOWS),
    "causal window": (DSPARK, WINDOWS | {"causal_layers": (0,)}),
    "reduced vocabulary": (DSPARK, {"draft_vocab_size": 32, "confidence": "outputs and tokens"}),
    "confidence": (DSPARK, {"confidence": "outputs and tokens"}),
    "fill-in with a chain": (DSPARK, {"slots": "fill-in", "aux_layers": (0, 2, FINAL_NORM)}),
}


def made(name: str, **changes: Any) -> Any:
    fields, own = HEADS[name]
    return block_head(tiny_llama(), fields, **{**own, **changes})


def check(head: Any, completions: Any, prompts: Any, new: int = 20) -> None:
    assert [c.token_ids for c in completions] == [hf_greedy(p, new) for p in prompts]
    assert [wrong_rounds(head, c) for c in completions] == [[] for _ in prompts]


@functools.cache
def deep_llama() -> Any:
    """A target of 8 layers: states of 9 places."""
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, "num_hidden_layers": 8})).eval().requires_grad_(False)
    enlarge(model, 0)
    return model


def random_head(seed: int) -> Any:
    """Any mixture of what a head can be."""
    draw = np.random.default_rng(seed)
    selector, layers = draw.random() < 0.25, int(draw.integers(1, 7))
    vocab = VOCAB if selector else int(draw.choice([VOCAB, 32, 16]))
    own = vocab < VOCAB or bool(draw.integers(2))
    some = [tuple(np.flatnonzero(draw.integers(0, 2, layers)).tolist()) for _ in range(2)]
    aux = sorted(draw.choice(9, int(draw.integers(1, 9)), replace=False).tolist())
    markov = None if selector else draw.choice([None, "vanilla", "gated", "rnn"])
    changes = {
        "num_layers": layers,
        "draft_vocab_size": vocab,
        "own_lm_head": own,
        "own_embed": bool(draw.integers(2)),
        "aux_layers": tuple(FINAL_NORM if b == 8 else b for b in aux),
        "block_size": int(draw.integers(4, 17)),
        "slots": str(draw.choice(["fill-in", "anchor-first"])),
        "windowed_layers": some[0],
        "window": int(draw.integers(1, 20)) if some[0] else None,
        "causal_layers": some[1],
        "markov": markov,
        "markov_rank": 0 if not markov else int(draw.choice([VOCAB, 5])),
        "embedding_scale": float(draw.choice([1.0, 0.5])),
        "logit_scale": float(draw.choice([1.0, 0.7])),
        "logit_softcap": None if draw.integers(2) else 20.0,
        **({"conv_kernel_size": int(draw.integers(1, 5)), "conv_group_size": 8} if draw.integers(2) else {}),
        **({"selector_rank": 5, "selector_top_k": int(draw.integers(1, VOCAB + 1))} if selector else {}),
    }
    return block_head(deep_llama(), DFLASH, seed, **changes)


def accepted_at_random(draw: np.random.Generator) -> Any:
    """Acceptance of up to three drafts, and now and then of all, with any token behind them."""

    def accept(drafts: torch.Tensor, num_drafts: torch.Tensor, target_ids: torch.Tensor) -> VerificationResult:
        rows = len(drafts)
        counts = np.where(draw.random(rows) < 0.1, drafts.shape[1], draw.integers(0, 4, rows))
        tokens = torch.from_numpy(draw.integers(0, VOCAB, rows))
        return VerificationResult(torch.from_numpy(counts).minimum(num_drafts), tokens)

    return accept


TIE = 1e-4
"""Most by which a logit may be less than the largest one in float64 for rounding to decide between them."""


@functools.cache
def deep_llama_in_float64() -> Any:
    return copy.deepcopy(deep_llama()).double()


def gap_in_float64(head: Any, prefix: list[int], drafts: list[int]) -> float:
    """By how much the logit of a draft is less than the largest one at most, each behind the drafts before it.

    The round is made again in float64, with the target's states and by the head without a cache. Norms of transformers
    and rotary angles stay float32.
    """
    head, gaps, ids = copy.deepcopy(head).double(), list[float](), torch.tensor(prefix)

    def forced(position: int, logits: torch.Tensor) -> torch.Tensor:
        (own,) = (head.target_ids == drafts[position - len(prefix)]).nonzero().tolist()
        gaps.append(float(logits.max() - logits[0, own]))
        return torch.tensor(own)

    states = deep_llama_in_float64()(ids[None, :-1], output_hidden_states=True, use_cache=False).hidden_states
    aux = torch.cat([states[layer][0] for layer in head.aux_layers], -1)
    assert block_drafts(head, ids, aux, len(drafts), forced) == drafts
    return max(gaps)


def wrong_but_for_ties(head: Any, prompt: list[int], completion: Any) -> tuple[list[int], list[int]]:
    """Rounds whose drafts are not the oracle's, without and with those in which float64 cannot tell the two apart."""
    wrong, ties, bonus, index = list[int](), list[int](), len(prompt), 0
    pairs = oracle_rounds(deep_llama(), head, prompt, completion)
    for number, (stats, drafts) in enumerate(zip(completion.stats.rounds, completion.drafts, strict=True)):
        if len(drafts):
            both, index = pairs[index], index + 1
            if both[0] != both[1]:
                prefix = (prompt + completion.token_ids)[: bonus + 1]
                is_tie = all(gap_in_float64(head, prefix, each) < TIE for each in both)
                (ties if is_tie else wrong).append(number)
        bonus += stats.emitted
    return wrong, ties


def check_random(seed: int, new_tokens: int = 18) -> int:
    """Rounds of a random head, of two requests in random sizes, whose drafts are accepted at random.

    A round with other drafts than the oracle's is made again in float64, where both must be as good as tied.

    Returns how many rounds each request had at least.
    """
    head, draw = random_head(seed), np.random.default_rng(seed + 1)
    sizes = {"page_size": int(draw.integers(1, 9)), "max_num_batched_tokens": int(draw.integers(36, 60))}
    sizes["num_speculative_tokens"] = int(draw.integers(1, head.block_size - head.first_slot + 1))
    with patch.multiple(assembly, twin_test=lambda *_: TwinReport(()), check_target=lambda *_: None):  # once is enough
        wrapped = wrap(deep_llama(), head, max_num_seqs=2, **sizes)
    prompts = [PROMPTS[i][:20] for i in draw.choice(6, 2, replace=False)]
    with patch.object(judging, "accept_greedy", accepted_at_random(draw)), torch.inference_mode():
        completions = wrapped.generate(prompts, replace(GREEDY, max_new_tokens=new_tokens))
        found = [wrong_but_for_ties(head, p, c) for p, c in zip(prompts, completions, strict=True)]
    assert [wrong for wrong, _ in found] == [[], []], (seed, found)
    assert sum(len(ties) for _, ties in found) <= 1, (seed, found)
    return min(len(c.stats.rounds) for c in completions)


def test_it_is_a_head_with_a_loop_that_shares_pages() -> None:
    head = made("dspark")
    loop = head.draft_loop(LoopSize(2, 20, 4, 3))
    assert isinstance(head, Head) and isinstance(head, BlockHead)
    assert isinstance(loop, DraftLoop) and isinstance(loop, SharesPages)


@pytest.mark.parametrize("seed", range(6))
def test_random_heads_draft_as_without_a_cache(seed: int) -> None:
    check_random(seed)


@pytest.mark.parametrize("much", [0.0, 1e-5, 1e-2])
def test_only_a_tie_in_float64_excuses_a_difference(much: float) -> None:
    """Another id whose row of lm_head is that of a draft, or a little longer or shorter, where the head drafts it."""
    head = block_head(deep_llama(), DFLASH, own_lm_head=True)
    wrapped = wrap(deep_llama(), head)
    (completion,) = wrapped.generate([PROMPTS[0]], replace(GREEDY, max_new_tokens=6))
    assert wrong_but_for_ties(head, PROMPTS[0], completion) == ([], [])
    draft = completion.drafts[0][1]
    other = (draft + 1) % VOCAB
    head.lm_head.weight[other] = head.lm_head.weight[draft] * (1 - much)
    moved = [other if token == draft else token for token in completion.drafts[0]]
    changed = replace(completion, drafts=[moved, *completion.drafts[1:]])
    wrong, ties = wrong_but_for_ties(head, PROMPTS[0], changed)
    assert (0 in ties, 0 in wrong) == ((True, False) if much < 1e-3 else (False, True))


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.cases(1)
def test_more_random_heads_draft_as_without_a_cache() -> None:
    """800 (seeds 100 to 899) with 50 new tokens, in 4 rounds or more each, as well; once one had a tie (1e-5)."""
    rounds = [check_random(seed) for seed in range(100, 150)]
    assert sum(rounds) > 5 * len(rounds)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("options", [{}, TIGHT], ids=["room", "tight"])
@pytest.mark.thorough
def test_tokens_are_the_targets_own_and_drafts_those_without_a_cache(
    name: str, options: dict[str, int], tmp_path: Path
) -> None:
    """From a folder: prompts in chunks, rejected and accepted drafts, pages crossed, preemption."""
    head = made(name)
    wrapped = wrap(tiny_llama(), head if name == "fill-in with a chain" else str(write_head(head, tmp_path)), **options)
    assert wrapped.num_speculative_tokens == head.block_size - head.first_slot
    completions = wrapped.generate(PROMPTS, GREEDY)
    check(head, completions, PROMPTS)
    assert (wrapped.engine_stats.preemptions > 0) == bool(options)
    assert wrapped.engine_stats.host_to_device == wrapped.engine_stats.rounds, "one copy with the loop's own arrays"
    assert free_everywhere(wrapped)


@pytest.mark.parametrize(("name", "most"), [("dspark", 3), ("dflash2", 1)])
def test_accepted_and_rejected_drafts_both_occur(name: str, most: int) -> None:
    head = made(name)
    completions = wrap(tiny_llama(), head).generate(PROMPTS[:2], GREEDY)
    check(head, completions, PROMPTS[:2])
    accepted = [r.accepted for c in completions for r in c.stats.rounds]
    assert 0 in accepted and max(accepted) >= most


def test_fewer_drafts_are_the_first_of_the_whole_block() -> None:
    """Q stays what it is: neighbours with other K change nothing, nor does a K of its own."""
    head = made("window")
    wrapped = wrap(tiny_llama(), head)
    params = [replace(GREEDY, max_new_tokens=6, num_speculative_tokens=k) for k in (1, 6, 2)]
    mixed = wrapped.generate(PROMPTS[:3], params)
    check(head, mixed, PROMPTS[:3], 6)
    for completion, prompt, own in zip(mixed, PROMPTS, params, strict=False):
        (alone,) = wrap(tiny_llama(), head).generate([prompt], own)
        assert alone.drafts == completion.drafts


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_blocks_may_end_beyond_the_longest_request(name: str) -> None:
    """Up to the last token that a request may have, in pages that end in its midst, and with K less than Q."""
    head = made(name)
    for drafts in (1, head.block_size - head.first_slot):
        wrapped = wrap(tiny_llama(), head, max_model_len=23, page_size=5, num_speculative_tokens=drafts)
        prompts = [PROMPTS[1][:n] for n in (12, 17, 21)]
        params = [replace(GREEDY, max_new_tokens=23 - len(p)) for p in prompts]
        completions = wrapped.generate(prompts, params)
        assert [len(c.token_ids) for c in completions] == [11, 6, 2]
        assert [wrong_rounds(head, c) for c in completions] == [[], [], []]
        assert free_everywhere(wrapped)


@pytest.mark.parametrize(("name", "most"), [("dflash", 5), ("dspark", 6)])
def test_more_drafts_than_the_block_has_are_refused(name: str, most: int) -> None:
    assert wrap(tiny_llama(), made(name), num_speculative_tokens=most).num_speculative_tokens == most
    with pytest.raises(
        InvalidInputError, match=rf"num_speculative_tokens={most + 1}: .* blocks of 6 tokens.* {most} or"
    ):
        wrap(tiny_llama(), made(name), num_speculative_tokens=most + 1)


def test_a_preempted_request_drafts_as_alone() -> None:
    head = made("dspark")
    wrapped = wrap(tiny_llama(), head, kv_cache_tokens=80, max_num_seqs=2)
    params = replace(GREEDY, max_new_tokens=24)
    together = wrapped.generate([PROMPTS[3], PROMPTS[1]], params)
    assert wrapped.engine_stats.preemptions
    for completion in together:
        (alone,) = wrap(tiny_llama(), head).generate([completion.prompt_token_ids], params)
        assert (alone.token_ids, alone.drafts) == (completion.token_ids, completion.drafts)
        assert wrong_rounds(head, completion) == []


def test_tokens_from_the_prefix_cache_have_the_heads_context() -> None:
    """The second call begins behind the first one's pages, in the middle of a prompt, and behind generated tokens."""
    head = made("causal window")
    wrapped = wrap(tiny_llama(), head)
    (first,) = wrapped.generate([PROMPTS[1]], replace(GREEDY, max_new_tokens=12))
    prompts = [[*PROMPTS[1][:26], 1, 2], PROMPTS[1] + first.token_ids[:10]]
    completions = wrapped.generate(prompts, replace(GREEDY, max_new_tokens=8))
    assert wrapped.engine_stats.cached_tokens >= 24 + 36
    check(head, completions, prompts, 8)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dflash", "rnn"])
def test_a_request_moves_with_the_heads_context(name: str) -> None:
    head = made(name)
    p, d, stays = (wrap(tiny_llama(), head, **MOVED_SIZES) for _ in range(3))
    expected = lived(stays.generate(MOVED, MOVED_PARAMS))
    assert lived(moved(p, d, MOVED, MOVED_PARAMS)) == expected


def test_drafts_by_lookup_take_the_place_of_the_heads() -> None:
    wrapped = wrap(tiny_llama(), [made("dspark"), "lookup"])
    completions = wrapped.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in completions] == [hf_greedy(p, 20) for p in PROMPTS]


def wrapped_by(backend: str, head: Any) -> Any:
    """FlexAttention is chosen by name on CUDA alone."""
    if backend == "flex":
        with backend_of_ours(FlexBackend(CPU)):
            return wrap(tiny_llama(), head)
    return wrap(tiny_llama(), head, backend=backend)


@pytest.mark.parametrize("backend", ["batch_invariant", "flex"])
@pytest.mark.parametrize("name", ["dflash", "causal window"])
def test_backends_without_such_layers_are_refused_by_name(backend: str, name: str) -> None:
    """Also where another layer of the head is causal; the message names what serves it."""
    message = f"group head: backend '{backend}' has causal attention alone.*use backend='torch', or on CUDA 'flashin"
    with pytest.raises(UnsupportedAttentionError, match=message):
        wrapped_by(backend, made(name))


@pytest.mark.filterwarnings("ignore:.*drafts were accepted")
@pytest.mark.parametrize("backend", ["batch_invariant", "flex"])
@pytest.mark.parametrize("name", ["dflash", "dspark", "causal window"])
@pytest.mark.cases(4)
def test_heads_whose_layers_are_all_causal_take_them(backend: str, name: str) -> None:
    head = made(name, causal_layers=(0, 1))
    wrapped = wrapped_by(backend, head)
    assert wrapped.backend_name == backend
    check(head, wrapped.generate(PROMPTS[:3], GREEDY), PROMPTS[:3])


SAMPLED = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.4, "top_k": 12},
    {},
)


@pytest.mark.parametrize("sampling", ["rejection", "keyed"])
@pytest.mark.parametrize("name", ["dflash", "dspark", "rnn", "gated", "dflash2"])
@pytest.mark.thorough
def test_drawn_drafts_are_those_of_the_oracle_with_the_same_noise(name: str, sampling: str) -> None:
    """Greedy rows among sampled ones; under keyed sampling the tokens are those of K = 0."""
    head, target = made(name), tiny_llama()
    params = [
        SamplingParams(max_new_tokens=16, return_drafts=True, seed=40 + i, **own) for i, own in enumerate(SAMPLED)
    ]
    wrapped = wrap(target, head, sampling=sampling, draft_sampling="probabilistic")
    completions = wrapped.generate(PROMPTS[:4], params)
    compared = [
        pair
        for completion, own, prompt in zip(completions, params, PROMPTS, strict=False)
        for pair in oracle_rounds(
            target, head, prompt, completion, (keyed_as if sampling == "keyed" else drawn_as)(own)
        )
    ]
    assert len(compared) > 20 and [ours for ours, _ in compared] == [right for _, right in compared]
    if sampling == "keyed":
        right = wrap(target, sampling=sampling).generate(PROMPTS[:4], params)
        assert [c.token_ids for c in completions] == [c.token_ids for c in right]


def wrong_in(wrapped: Any, head: Any) -> int:
    """Rounds whose drafts are not the oracle's; the tokens are right whatever the drafts are."""
    completions = wrapped.generate(PROMPTS[:4], GREEDY)
    assert [c.token_ids for c in completions] == [hf_greedy(p, 20) for p in PROMPTS[:4]]
    return sum(len(wrong_rounds(head, c)) for c in completions)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_layer_ids": [1, 2, 3]},
        {"is_causal": True},
        {"layer_types": ["full_attention", "full_attention"]},
        {"sample_from_anchor": False},
    ],
    ids=["aux off by one", "causality lost", "window lost", "slots of the other layout"],
)
def test_a_wrong_reading_shows_in_the_drafts(changes: dict[str, Any], tmp_path: Path) -> None:
    head = made("window")
    folder = str(write_head(head, tmp_path, **changes))
    assert wrong_in(wrap(tiny_llama(), folder, num_speculative_tokens=5), head) > 5


def test_a_block_that_begins_a_position_early_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = block_loop.block_arrays

    def early(draft: DraftInput, block_size: int, mask: int) -> HostBlock:
        right = plain(draft, block_size, mask)
        moved = replace(draft, committed_lens=draft.committed_lens - 1, tokens=np.roll(draft.tokens, -1, 1))
        wrong = plain(moved, block_size, mask)
        return replace(right, batch=wrong.batch)

    monkeypatch.setattr(block_loop, "block_arrays", early)
    head = made("dflash")
    assert wrong_in(wrap(tiny_llama(), head), head) > 5


def test_a_convolution_that_reads_the_block_before_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slot 0 of a row would read the last slot of the row before it in the batch."""
    plain = BlockConvolution.over_slots
    monkeypatch.setattr(BlockConvolution, "over_slots", lambda *given: plain(*given[:3], given[3].flatten(0, 1)[None]))
    head = block_head(tiny_llama(), DFLASH2)
    assert wrong_in(wrap(tiny_llama(), head), head) > 5


def test_a_block_without_pages_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first round after a prompt: blocks of several rows would meet on the null page."""
    wrapped = wrap(tiny_llama(), made("dflash"), num_speculative_tokens=1, page_size=1)
    plain, head_pages = BlockTables.extend, scheduler_of(wrapped).head_pages

    def fewer(tables: BlockTables, rows: Any, tokens: Any) -> None:
        plain(tables, rows, tokens - 4 if tables is head_pages else tokens)

    monkeypatch.setattr(BlockTables, "extend", fewer)
    with pytest.raises(InvariantError, match="a block lies on pages that its row does not own"):
        wrapped.generate(PROMPTS[:1], replace(GREEDY, max_new_tokens=3))


def test_the_targets_lm_head_in_place_of_the_heads_shows(tmp_path: Path) -> None:
    head = made("dspark")
    wrapped = wrap(tiny_llama(), str(write_head(head, tmp_path)))
    wrapped.head.lm_head.weight.copy_(wrapped.hf_model.lm_head.weight)
    assert wrong_in(wrapped, head) > 5


def test_context_that_rejected_drafts_left_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next round's context overwrites what a block wrote: left out, blocks read each other."""
    head = made("dspark")
    plain = GroupRunner.write
    rejecting = lambda self, layer, *rest: plain(self, layer, *rest) if len(rest[-1]) > 6 else None  # noqa: E731
    monkeypatch.setattr(GroupRunner, "write", rejecting)
    assert wrong_in(wrap(tiny_llama(), head), head) > 5


def test_pages_of_the_head_end_with_the_block() -> None:
    head = made("dflash")
    wrapped = wrap(tiny_llama(), head, page_size=4)
    stream = wrapped.stream([PROMPTS[0]], replace(GREEDY, max_new_tokens=9))
    next(stream)
    scheduler = scheduler_of(wrapped)
    (request,) = scheduler.running
    assert len(scheduler.head_pages.pages_of(request.row)) * 4 >= 5 + head.block_size
    assert torch.isfinite(wrapped.hf_model.lm_head.weight).all()
    stream.close()
