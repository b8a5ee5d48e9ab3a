"""longrope models: each request gets the factors that `generate` gives it alone, whatever else is in the batch.

In `generate` a Llama keeps its cached keys when it passes the original length, a Phi-3 reads all again. The reference
of the latter runs without a cache: that is the same, and transformers 5.17 loses what it has read (5.23 does not).
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from fakes import TINY, random_prompts, wrap
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from attention.hf.patches import borrowed
from benchmarks.sweep_configs import VOCAB
from benchmarks.sweep_models import ScriptedHead
from specdec import SamplingParams
from specdec.errors import InvalidInputError
from specdec.extras.long_factors import LongFactors
from specdec.loading.sizes import max_model_len
from specdec.selftest.twin import enlarge
from specdec.wrapped.long_rope import LongRopeRule, find_long_rope, looked_up
from tests.specdec.execution.test_graphs import graphs_on_cpu, recorded_on_cpu, with_graphs  # noqa: F401 (fixtures)

ORIGINAL, NEW = 32, 24
LENS = (5, 21, 22, 23, 31, 32, 33, 50)
"""The first stays short, four pass the original length, one does with its first new token, two with their prompts."""
OPTIONS = {"max_num_seqs": 6, "max_num_batched_tokens": 25, "kv_cache_tokens": 640}


def factors(pairs: int) -> dict[str, Any]:
    steps = {"short_factor": [1 + 0.1 * i for i in range(pairs)], "long_factor": [2 + 0.5 * i for i in range(pairs)]}
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        **steps,
    }


MLA = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": factors(8)},
    "minicpm3": {"rope_parameters": factors(4), "num_key_value_heads": 4, "head_dim": 8, **MLA},
    "phi3": {"rope_parameters": factors(8), "original_max_position_embeddings": ORIGINAL, "hidden_size": 64},
    "phimoe": {
        "rope_parameters": {**factors(8), "short_mscale": 1.1, "long_mscale": 1.4},
        "original_max_position_embeddings": ORIGINAL,
        "num_local_experts": 4,
        "hidden_size": 64,
    },
}
REREADS = {"phi3", "phimoe"}


@functools.cache
def _model(kind: str) -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **{**TINY, "vocab_size": VOCAB, "num_hidden_layers": 2, **KINDS[kind]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    enlarge(model)
    return model


def model_of(kind: str) -> PreTrainedModel:
    return copy.deepcopy(_model(kind))


@functools.cache
def answers_of(kind: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what the model says to each alone."""
    model, prompts = model_of(kind), random_prompts(LENS, seed=3, vocab_size=VOCAB)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        said = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            use_cache=kind not in REREADS,
            pad_token_id=0,
        )
        answers.append(said[0, len(prompt) :].tolist())
    return prompts, answers


def scripted(kind: str) -> ScriptedHead:
    texts = [prompt + answer for prompt, answer in zip(*answers_of(kind), strict=True)]
    return ScriptedHead(texts, VOCAB, (1, 1, 2), "cpu")


def said(wrapped: Any, prompts: Any) -> list[list[int]]:
    return [c.token_ids for c in wrapped.generate(prompts, SamplingParams(max_new_tokens=NEW))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "drafts"),
    [
        *(("llama", 3), ("phi3", 0)),
        *(pytest.param(kind, 3, marks=pytest.mark.long) for kind in ("minicpm3", "phi3", "phimoe")),
        pytest.param("llama", 0, marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("every_self_test")
@pytest.mark.thorough
def test_each_request_has_the_factors_that_it_has_alone(kind: str, drafts: int) -> None:
    """In one ragged batch, read in chunks; the twin passes the original length, too."""
    prompts, answers = answers_of(kind)
    head = scripted(kind) if drafts else None
    with wrap(model_of(kind), head, num_speculative_tokens=drafts, **OPTIONS) as wrapped:
        assert LongFactors(LongRopeRule(ORIGINAL, kind in REREADS)) in wrapped.config.extras
        assert str(wrapped.twin) == f"exact past original_max_position_embeddings={ORIGINAL}"
        assert said(wrapped, prompts) == answers
        assert [said(wrapped, prompt)[0] for prompt in prompts] == answers
        assert wrapped.usage().target_pages == 0
        again = ", a request that passes it is read again" if kind in REREADS else ""
        assert wrapped.describe()["long_rope"] == f"short factors up to {ORIGINAL} tokens, long ones beyond{again}"
        if drafts:
            assert sum(sum(r.accepted for r in c.stats.rounds) for c in wrapped.generate(prompts)) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "drafts"), [("llama", 3), ("phi3", 0), pytest.param("phi3", 3, marks=pytest.mark.long)]
)
@pytest.mark.thorough
def test_rounds_from_graphs_choose_by_token(kind: str, drafts: int, graphs_on_cpu: None) -> None:  # noqa: F811
    prompts, answers = answers_of(kind)
    head = scripted(kind) if drafts else None
    wrapped = with_graphs(head, model_of(kind), num_speculative_tokens=drafts, **OPTIONS)
    assert said(wrapped, prompts) == answers
    assert [said(wrapped, prompt)[0] for prompt in prompts] == answers  # alone, rounds are launched ahead


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", pytest.param("phi3", marks=pytest.mark.long)])
@pytest.mark.thorough
def test_a_request_that_is_preempted_and_read_again_keeps_its_factors(kind: str) -> None:
    prompts, answers = answers_of(kind)
    few = {**OPTIONS, "kv_cache_tokens": 112}
    with wrap(model_of(kind), scripted(kind), num_speculative_tokens=3, **few) as wrapped:
        assert said(wrapped, prompts) == answers
        assert wrapped.engine_stats.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", pytest.param("phi3", marks=pytest.mark.long)])
@pytest.mark.thorough
def test_pages_with_short_and_with_long_factors_are_not_shared(kind: str) -> None:
    """The same first tokens in a short prompt, in a long one, and in a long one again."""
    prompts, answers = answers_of(kind)
    at = LENS.index(50)
    long, answer = prompts[at], answers[at]
    with wrap(model_of(kind), scripted(kind), num_speculative_tokens=3, **OPTIONS) as wrapped:
        assert wrapped.prefix_caching == "on"
        params = SamplingParams(max_new_tokens=NEW)
        short = wrapped.generate(long[:28], params)[0].token_ids
        completions = [wrapped.generate(tokens, params)[0] for tokens in (long, long, long[:28])]
        assert [c.token_ids for c in completions] == [answer, answer, short]
        # The short one of a Phi-3 passes the original length: its first tokens were read again with long factors.
        found = [24 if kind in REREADS else 0, 48, 24]
        assert [c.stats.cached_tokens for c in completions] == found


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.long] * (k in ("minicpm3", "phimoe"))) for k in KINDS]
)
@pytest.mark.cases(1)
def test_the_tables_hold_what_the_modules_compute(kind: str) -> None:
    """cos and sin bit by bit, in compiled code as well; afterwards the module is as it was."""
    model, x = model_of(kind), torch.zeros(1)
    found = find_long_rope(model)
    assert found is not None
    (module,) = found.modules
    values, own = looked_up(found, x, 64), type(module).forward
    positions, first = torch.arange(60), torch.arange(ORIGINAL)
    compiled = torch.compile(lambda p: module(x, p), backend="eager", fullgraph=True, dynamic=True)
    long, short = own(module, x, positions[None]), own(module, x, first[None])
    for call in (lambda p: module(x, p), compiled):
        with borrowed(values):
            late, early = call(positions[None]), call(first[None] - ORIGINAL)
        for found_part, again, long_part, short_part in zip(late, early, long, short, strict=True):
            assert torch.equal(found_part[:, :ORIGINAL], short_part)
            assert torch.equal(found_part[:, ORIGINAL:], long_part[:, ORIGINAL:])
            assert torch.equal(again, long_part[:, :ORIGINAL])
    assert "forward" not in vars(module)
    assert not torch.equal(long[0][:, :ORIGINAL], short[0])


def test_a_model_whose_generate_is_not_certain_is_limited_to_short_factors() -> None:
    model = model_of("phi3")
    model.config.original_max_position_embeddings = ORIGINAL - 1
    assert find_long_rope(model) is None
    assert max_model_len(None, model) == ORIGINAL
    with pytest.raises(
        InvalidInputError, match=rf"beyond {ORIGINAL} positions the model's rotary embedding \(longrope\)"
    ):
        max_model_len(ORIGINAL + 1, model)
    assert max_model_len(None, model_of("phi3")) == TINY["max_position_embeddings"]


@pytest.mark.slow
@pytest.mark.thorough
def test_requests_that_stay_short_need_no_rule() -> None:
    with wrap(model_of("phi3"), max_model_len=ORIGINAL, **OPTIONS) as wrapped:
        assert not any(isinstance(extra, LongFactors) for extra in wrapped.config.extras)
        prompts, answers = answers_of("phi3")
        assert said(wrapped, prompts[0])[0] == answers[0]
