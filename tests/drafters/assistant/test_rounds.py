"""Rounds with a small draft model: the target's own tokens, and the drafts that the model makes without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import VOCAB, free_everywhere, hf_greedy, random_prompts, tiny_llama, wrap
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen3Config, Qwen3ForCausalLM

from drafters.oracle import ChooseDraft, most_probable
from specdec.requests.sampling import SamplingParams
from specdec.selftest.twin import enlarge
from tests.sampled_rounds import drawn_as

PROMPTS = random_prompts((5, 33, 1, 17, 60, 9))
GREEDY = SamplingParams(max_new_tokens=24, return_drafts=True)
TIGHT = {"kv_cache_tokens": 88, "max_num_seqs": 6, "max_num_batched_tokens": 36, "page_size": 3}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
OTHERS: dict[str, Any] = {
    "learned positions": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=40, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    ),
    "norms of queries": lambda: Qwen3ForCausalLM(
        Qwen3Config(vocab_size=VOCAB, num_key_value_heads=2, head_dim=8, max_position_embeddings=128, **SIZES)
    ),
    "windows and soft caps": lambda: Gemma2ForCausalLM(
        Gemma2Config(vocab_size=VOCAB, num_key_value_heads=2, head_dim=8, sliding_window=7, **SIZES)
    ),
}
"""Models of other series than the target's, by what is odd about them."""


def small(seed: int = 0) -> Any:
    """It often says what the target says, and depends more on the tokens before the last one."""
    return tiny_llama(seed=seed, context=0.1)


def without_cache(model: Any, ids: list[int], count: int, choose: ChooseDraft = most_probable) -> list[int]:
    """Drafts after these tokens, of a forward over all of them for each."""
    longest, drafts = model.config.max_position_embeddings, list[int]()
    for _ in range(count):
        tokens = torch.tensor([ids + drafts])
        positions = torch.arange(tokens.shape[1])[None].clamp_max(longest - 1)
        mask = torch.ones_like(tokens)  # without one, transformers takes equal positions for several texts in a row
        with torch.no_grad():
            logits = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]
        drafts.append(int(choose(len(ids) + len(drafts), logits)))
    return drafts


def compared(model: Any, completion: Any, choose: ChooseDraft = most_probable) -> list[tuple[list[int], list[int]]]:
    """(drafts of the engine, those of the model without a cache) of every round."""
    bonus, found = len(completion.prompt_token_ids), []
    ids = completion.prompt_token_ids + completion.token_ids
    for stats, drafts in zip(completion.stats.rounds, completion.drafts, strict=True):
        if drafts:
            found.append((list(drafts), without_cache(model, ids[: bonus + 1], len(drafts), choose)))
        bonus += stats.emitted
    return found


def check(model: Any, completions: Any, least: int = 20) -> None:
    every = [pair for completion in completions for pair in compared(model, completion)]
    assert len(every) > least
    assert [ours for ours, _ in every] == [oracle for _, oracle in every]


@pytest.mark.slow
def test_a_small_model_drafts_as_without_a_cache() -> None:
    """A prompt in chunks, rejected drafts, pages crossed."""
    wrapped = wrap(tiny_llama(), small(), num_speculative_tokens=3, max_num_batched_tokens=12)
    prompts = PROMPTS[:2]
    completions = wrapped.generate(prompts, SamplingParams(max_new_tokens=12, return_drafts=True))
    assert [c.token_ids for c in completions] == [hf_greedy(p, 24)[:12] for p in prompts]
    check(small(), completions, 8)
    accepted = [r.accepted for c in completions for r in c.stats.rounds]
    assert 0 in accepted and max(accepted) >= 2


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, TIGHT])
def test_tokens_are_the_targets_own_and_drafts_those_without_a_cache(options: dict[str, int]) -> None:
    wrapped = wrap(tiny_llama(), small(), num_speculative_tokens=4, **options)
    completions = wrapped.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in completions] == [hf_greedy(p, 24) for p in PROMPTS]
    check(small(), completions)
    assert (wrapped.engine_stats.preemptions > 0) == bool(options)
    assert wrapped.engine_stats.host_to_device == wrapped.engine_stats.rounds, "one copy with the loop's own arrays"
    assert free_everywhere(wrapped)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.cases(1)
def test_models_of_other_series_draft_as_without_a_cache(kind: str) -> None:
    """Also where the target's requests are longer than the draft model was made for (40 positions of 84)."""
    torch.manual_seed(0)
    model = OTHERS[kind]().eval()
    enlarge(model, 0)
    wrapped = wrap(tiny_llama(), model, num_speculative_tokens=3)
    completions = wrapped.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in completions] == [hf_greedy(p, 24) for p in PROMPTS]
    wrapped.close()
    check(model, completions)


@pytest.mark.slow
def test_pages_of_a_shared_prefix_hold_what_a_plain_forward_computes() -> None:
    """The second request begins behind the first one's pages, in the middle of a prompt."""
    wrapped = wrap(tiny_llama(), small(), num_speculative_tokens=3)
    first = PROMPTS[1]
    wrapped.generate([first], SamplingParams(max_new_tokens=4))
    params = SamplingParams(max_new_tokens=8, return_drafts=True)
    completions = wrapped.generate([[*first[:26], 1, 2], first], params)
    assert wrapped.engine_stats.cached_tokens >= 24
    check(small(), completions, 4)


@pytest.mark.slow
def test_sampled_rows_draw_drafts_from_the_models_distribution() -> None:
    settings: list[dict[str, Any]] = [{"temperature": 1.0}, {}, {"temperature": 1.4, "top_k": 12}]
    params = [SamplingParams(max_new_tokens=16, return_drafts=True, seed=40 + i, **s) for i, s in enumerate(settings)]
    sizes = {"num_speculative_tokens": 3, "draft_sampling": "probabilistic"}
    wrapped = wrap(tiny_llama(), small(), **sizes)
    completions = wrapped.generate(PROMPTS[:3], params)
    every = [compared(small(), c, drawn_as(own)) for c, own in zip(completions, params, strict=True)]
    assert sum(map(len, every)) > 15
    assert [[ours for ours, _ in own] for own in every] == [[oracle for _, oracle in own] for own in every]
    alone = wrap(tiny_llama(), small(), **sizes).generate([PROMPTS[2]], params[2])
    assert alone[0].token_ids == completions[2].token_ids


@pytest.mark.thorough
@pytest.mark.slow
def test_tokens_of_transformers_assisted_generation() -> None:
    """Batch 1 there; a batch of 8 and each request alone here."""
    prompts, target, assistant = random_prompts(range(3, 35, 4)), tiny_llama(), small()
    assistant.generation_config.num_assistant_tokens = 4
    theirs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = target.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=assistant, max_new_tokens=16)
        theirs.append(out[0, len(prompt) :].tolist())
    wrapped = wrap(tiny_llama(), small(), num_speculative_tokens=4, max_num_seqs=8, max_num_batched_tokens=64)
    together = wrapped.generate(prompts, SamplingParams(max_new_tokens=16))
    alone = [wrapped.generate([prompt], SamplingParams(max_new_tokens=16))[0] for prompt in prompts]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone] == theirs


@pytest.mark.slow
def test_beside_lookup_and_for_the_last_positions() -> None:
    """Drafts by lookup replace the model's; requests end at the longest length."""
    wrapped = wrap(tiny_llama(), [small(), "lookup"], num_speculative_tokens=3, max_model_len=40)
    prompts = [[1, 2, 3, 4] * 6, PROMPTS[1]]
    completions = wrapped.generate(prompts, SamplingParams(max_new_tokens=30))
    assert [c.token_ids for c in completions] == [
        hf_greedy(p, n)[: 40 - len(p)] for p, n in zip(prompts, (24, 24), strict=True)
    ]
    assert free_everywhere(wrapped)
