"""Closing a model gives the GPU's memory back, graphs and compiled code included, and leaves the target as it was."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from fakes import hooks_of
from transformers import LlamaForCausalLM

from specdec import ClosedModelError, SamplingParams, SpeculativeModel
from specdec.compiler.siblings import SiblingLinear
from tests.gpu.test_graph_rounds import PROMPTS, Tokenizer, pair

SHORT = SamplingParams(max_new_tokens=24)


def wrapped(target: LlamaForCausalLM, head: Any, graphs: bool) -> SpeculativeModel:
    options: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "kv_cache_tokens": 65536}
    return SpeculativeModel.from_pretrained(
        target,
        head,
        tokenizer=Tokenizer(),
        backend="flashinfer",
        num_speculative_tokens=3,
        cuda_graphs=graphs,
        **options,
    )


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def state_of(root: torch.nn.Module) -> list[Any]:
    modules = [(name, id(m), type(m), sorted(vars(m)), hooks_of(m)) for name, m in root.named_modules()]
    return [modules, [(n, id(p), p.stride(), p.untyped_storage().nbytes()) for n, p in root.named_parameters()]]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_memory_comes_back_and_the_model_is_what_it_was(graphs: bool, how: str) -> None:
    target, head = pair(torch.bfloat16)
    with wrapped(target, head, graphs) as model:  # what the first engine of a process leaves for all is no leak
        right = [c.token_ids for c in model.generate(PROMPTS, SHORT)]
    before, values = state_of(target), {n: p.clone() for n, p in target.named_parameters()}
    head_before, memory = state_of(head), allocated()
    for _ in range(3):
        model = wrapped(target, head, graphs)
        assert [c.token_ids for c in model.generate(PROMPTS, SHORT)] == right
        assert any(isinstance(m, SiblingLinear) for m in target.modules()) == graphs
        assert allocated() > 1.2 * memory
        if how == "closed":
            model.close()
            with pytest.raises(ClosedModelError):
                model.generate(PROMPTS, SHORT)
        del model
        now = allocated()
        assert abs(now - memory) <= 0.01 * memory, f"{memory} bytes before, {now} after"
        assert (state_of(target), state_of(head)) == (before, head_before)
        assert all(torch.equal(p, values[n]) for n, p in target.named_parameters())


def test_of_two_models_with_graphs_the_second_goes_on_when_the_first_is_closed() -> None:
    target, head = pair(torch.bfloat16)
    other = pair(torch.bfloat16)[1]
    first, second = wrapped(target, head, True), wrapped(target, other, True)
    right = [c.token_ids for c in first.generate(PROMPTS, SHORT)]
    first.close()
    assert [c.token_ids for c in second.generate(PROMPTS, SHORT)] == right
    assert any(isinstance(m, SiblingLinear) for m in target.modules())
    second.close()
    assert not any(isinstance(m, SiblingLinear) for m in target.modules())
    assert all(hooks_of(m) == (0, 0) for m in target.modules())


def test_a_default_device_of_the_callers_changes_nothing() -> None:
    """It names the GPU, where no generator of the CPU can make a tensor."""
    target, head = pair(torch.bfloat16)
    plain = wrapped(target, head, True)
    tokens = [completion.token_ids for completion in plain.generate(PROMPTS, SHORT)]
    plain.close()
    torch.set_default_device("cuda")
    try:
        model = wrapped(target, head, True)
        assert [completion.token_ids for completion in model.generate(PROMPTS, SHORT)] == tokens
        assert model.refresh() == model.self_test_error
        model.close()
    finally:
        torch.set_default_device(None)
