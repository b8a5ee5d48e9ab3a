"""Models with an indexer, as dense attention up to index_topk tokens, without running it; two attentions a layer."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from fakes import random_prompts
from transformers import PreTrainedModel

from attention.hf.model_specific import dense_up_to, indexers
from benchmarks.sweep_configs import THRESHOLD, VOCAB, named_cases
from benchmarks.sweep_models import NumberTokenizer, ScriptedHead, build
from specdec import SamplingParams, SpeculativeModel
from specdec.errors import InvalidInputError, SpecdecWarning
from specdec.loading.sizes import max_model_len

NEW = 20
SPARSE = ["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"]
ALIKE = ("glm_moe_dsa", "axk2")
"""Their attention is deepseek_v32's: `make test` leaves their answers out."""
PROMPTS = random_prompts((12, 3, 7), seed=2, vocab_size=VOCAB)
"""The first and its answer are as many tokens as an indexer chooses keys."""


@functools.cache
def answered(kind: str) -> tuple[PreTrainedModel, list[list[int]]]:
    (case, *_) = named_cases((kind,))
    model, answers = build(case), []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        answers.append(said[0, len(prompt) :].tolist())
    return model, answers


def wrapped(kind: str, **options: Any) -> SpeculativeModel:
    model, answers = answered(kind)
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    head = ScriptedHead(texts, VOCAB, (1, 2, 4), "cpu")
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "page_size": 4, "kv_cache_tokens": 200}
    options = {"num_speculative_tokens": 3, "backend": "torch", **sizes, **options}
    return SpeculativeModel.from_pretrained(model, head, tokenizer=NumberTokenizer(), **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.long] * (k in ALIKE)) for k in SPARSE])
@pytest.mark.usefixtures("every_self_test")
@pytest.mark.thorough
def test_up_to_as_many_tokens_as_an_indexer_chooses_attention_is_dense(kind: str) -> None:
    model, answers = answered(kind)
    ran: list[Any] = []
    hooks = [indexer.wk.register_forward_hook(lambda *args: ran.append(args)) for _, indexer in indexers(model)]
    with pytest.warns(SpecdecWarning, match=rf"requests of up to index_topk={THRESHOLD} tokens instead of 256") as told:
        served = wrapped(kind)
    assert {warning.filename for warning in told} == {__file__}
    with served:
        del ran[:]  # its own eager forward in the self-test
        completions = served.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))
        assert [c.token_ids for c in completions] == answers
        assert len(PROMPTS[0]) + NEW == THRESHOLD == served.config.max_model_len
        assert sum(r.accepted for c in completions for r in c.stats.rounds) > 0
        assert hooks and not ran
        assert served.describe()["sparse_attention"].startswith(f"dense up to index_topk={THRESHOLD} tokens")
        with pytest.raises(InvalidInputError, match=f"with max_model_len={THRESHOLD} at most {THRESHOLD - 1}"):
            served.generate([PROMPTS[0] * 3])
    for hook in hooks:
        hook.remove()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.slow
def test_a_length_beyond_what_an_indexer_chooses_is_refused_by_name() -> None:
    model, _ = answered("deepseek_v32")
    assert dense_up_to(model) == THRESHOLD
    assert max_model_len(THRESHOLD, model) == THRESHOLD
    with pytest.raises(
        InvalidInputError, match=rf"max_model_len={THRESHOLD + 1}: beyond index_topk={THRESHOLD} tokens"
    ):
        wrapped("deepseek_v32", max_model_len=THRESHOLD + 1)


@pytest.mark.slow
@pytest.mark.usefixtures("every_self_test")
@pytest.mark.thorough
def test_two_attentions_a_layer() -> None:
    _, answers = answered("longcat_flash")
    with wrapped("longcat_flash") as served:
        assert [c.token_ids for c in served.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))] == answers
        assert len(served.target.runner.runners[0].layers) == 8 == 2 * served.target.num_layers
