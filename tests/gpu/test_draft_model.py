"""A small draft model in rounds from CUDA graphs on a GPU: tokens and drafts of eager rounds, in rounds of one shape
and of any, and no synchronisation but the round's read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import count_calls, free_everywhere
from transformers import LlamaForCausalLM

from drafters.loops.fixed_forms import FixedTokens
from specdec.execution.base import DraftedVerification
from specdec.execution.ragged import RaggedPrefill
from specdec.model import SpeculativeModel
from tests.agreement import agreement
from tests.gpu.test_graph_modules import CUDA, GREEDY, MIXED, PROMPTS, Tokenizer, check, llama, strict_launches

SIZES: dict[str, Any] = {"num_speculative_tokens": 3, "max_num_seqs": 4, "max_num_batched_tokens": 48}


def pair(dtype: torch.dtype) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """A target that nearly passes the token embedding on, with clear winners, and half of its layers as draft model."""
    torch.manual_seed(0)
    target = LlamaForCausalLM(llama()).eval().requires_grad_(False)
    target.get_input_embeddings().weight.mul_(50)  # type: ignore[operator]
    target.get_output_embeddings().weight.mul_(20)  # type: ignore[operator]
    config = llama()
    config.num_hidden_layers = 2
    small = LlamaForCausalLM(config).eval().requires_grad_(False)
    small.load_state_dict(target.state_dict(), strict=False)
    for layer in small.model.layers:
        layer.self_attn.o_proj.weight.mul_(4)
    return target.to(CUDA, dtype), small.to(CUDA, dtype)


def model(graphs: bool, dtype: torch.dtype = torch.bfloat16, **options: Any) -> SpeculativeModel:
    """Prompts come in chunks of at most 48 tokens, beside verifications."""
    target, small = pair(dtype)
    given = {"backend": "flashinfer", "max_model_len": 512, **SIZES, **options}
    return SpeculativeModel.from_pretrained(target, small, tokenizer=Tokenizer(), cuda_graphs=graphs, **given)


@pytest.mark.parametrize("drafts", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_size", [16, 1])
def test_graphs_give_the_eager_tokens_and_drafts(
    dtype: torch.dtype, drafts: int, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: dict[str, Any] = {"num_speculative_tokens": drafts, "page_size": page_size}
    eager = model(False, dtype, **own).generate(PROMPTS, GREEDY)
    captured = count_calls(monkeypatch, FixedTokens, "prefill")
    graphed = model(True, dtype, **own)
    assert captured
    drafting = count_calls(monkeypatch, type(graphed.engine.executor), "_draft_on")
    ragged = count_calls(monkeypatch, RaggedPrefill, "run")
    completions = graphed.generate(PROMPTS, GREEDY)
    assert len(ragged) > 6 and len(drafting) > len(ragged) + 10
    assert free_everywhere(graphed)
    check(completions, eager, 0.95 if dtype is torch.float16 else 0.85)


def test_one_row_at_a_time() -> None:
    eager = model(False, torch.float16, max_num_seqs=1).generate(PROMPTS, GREEDY)
    check(model(True, torch.float16, max_num_seqs=1).generate(PROMPTS, GREEDY), eager, 0.95)


def test_sampled_rows_among_greedy_ones() -> None:
    """Same seeds: the uniforms are the same, so rounding alone tells them apart."""
    eager = model(False, torch.float16).generate(PROMPTS, MIXED)
    check(model(True, torch.float16).generate(PROMPTS, MIXED), eager, 0.9)


def test_neighbours_change_no_token_where_matmuls_and_attention_are_batch_invariant() -> None:
    """Greedy tokens are, bit for bit, those of every request alone, and of the target without drafts."""
    graphed = model(True, backend="batch_invariant")
    together = graphed.generate(PROMPTS, GREEDY)
    alone = [graphed.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert max(r.accepted for c in together for r in c.stats.rounds) >= 1


def test_the_users_own_forward_goes_on() -> None:
    target, small = pair(torch.bfloat16)
    ids = torch.tensor([PROMPTS[0]], device=CUDA)
    before = small(ids).logits
    given: dict[str, Any] = {"tokenizer": Tokenizer(), "max_model_len": 512, **SIZES}
    with SpeculativeModel.from_pretrained(target, small, cuda_graphs=True, **given) as wrapped:
        wrapped.generate(PROMPTS, GREEDY)
        assert agreement(small(ids).logits.argmax(-1).tolist(), before.argmax(-1).tolist()) == 1
    assert torch.equal(small(ids).logits, before)


@pytest.mark.parametrize("params", [GREEDY, MIXED], ids=["greedy", "mixed"])
def test_launching_a_round_never_synchronises(params: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside verifications, and verifications alone; what has to be captured was before."""
    wrapped = model(True, enable_prefix_caching=False)
    wrapped.generate(PROMPTS, params)
    found = strict_launches(wrapped.engine.executor, monkeypatch)
    ragged = count_calls(monkeypatch, RaggedPrefill, "run")
    wrapped.generate(PROMPTS, params)
    assert sum(isinstance(each, DraftedVerification) for each in found) >= len(ragged) + 10
