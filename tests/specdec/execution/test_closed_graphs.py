"""What graphs do to a model's projections is undone with the engine; the graphs are those of test_graphs.py."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from fakes import eagle3_head, hf_greedy, hooks_of, random_prompts, tiny_llama, wrap
from torch import nn

from specdec.compiler.siblings import SiblingLinear
from specdec.requests.sampling import SamplingParams
from tests.specdec.execution.test_graphs import Replayed, graphs_on_cpu, recorded_on_cpu, with_graphs  # noqa: F401

PROMPTS = random_prompts((5, 33, 17))
SHORT = SamplingParams(max_new_tokens=12)
RIGHT = [hf_greedy(prompt, 12) for prompt in PROMPTS]
SIZES = {"num_speculative_tokens": 3, "max_num_seqs": 3}


def state_of(root: nn.Module) -> list[Any]:
    modules = [(name, id(m), type(m), sorted(vars(m)), hooks_of(m)) for name, m in root.named_modules()]
    parameters = [
        (name, id(p), p.stride(), p.storage_offset(), p.untyped_storage().nbytes(), p.requires_grad, p.tolist())
        for name, p in root.named_parameters()
    ]
    return [modules, parameters]


def num_siblings(root: nn.Module) -> int:
    return sum(isinstance(m, SiblingLinear) for m in root.modules())


@pytest.mark.slow
@pytest.mark.thorough
def test_closing_gives_projections_their_own_memory_back(graphs_on_cpu: list[Replayed]) -> None:  # noqa: F811
    target = tiny_llama()
    head: Any = eagle3_head(target)
    before = state_of(target), state_of(head)
    for _ in range(3):
        model = with_graphs(head, target, **SIZES)
        assert (num_siblings(target), num_siblings(head)) == (5 * 4, 5)
        assert [name for name, *_ in before[0][0]] == [name for name, _ in target.named_modules()]
        assert [c.token_ids for c in model.generate(PROMPTS, SHORT)] == RIGHT
        assert any(graph.replays for graph in graphs_on_cpu)
        model.close()
        assert (state_of(target), state_of(head)) == before


@pytest.mark.slow
def test_a_dropped_model_gives_them_back_too(graphs_on_cpu: list[Replayed]) -> None:  # noqa: F811
    target = tiny_llama()
    before = state_of(target)
    with_graphs(None, target, num_speculative_tokens=0, max_num_seqs=3)
    graphs_on_cpu.clear()
    gc.collect()
    assert state_of(target) == before


@pytest.mark.slow
def test_the_last_of_two_engines_gives_them_back(graphs_on_cpu: list[Replayed]) -> None:  # noqa: F811
    target = tiny_llama()
    before = state_of(target)
    first, second = with_graphs(eagle3_head(target), target, **SIZES), with_graphs(eagle3_head(target), target, **SIZES)
    eager = wrap(target)
    addresses = [p.data_ptr() for p in target.parameters()]
    first.close()
    assert num_siblings(target) == 5 * 4
    assert [p.data_ptr() for p in target.parameters()] == addresses, "the second's graphs read them there"
    assert [c.token_ids for c in second.generate(PROMPTS, SHORT)] == RIGHT
    second.close()
    assert num_siblings(target) == 0
    assert [c.token_ids for c in eager.generate(PROMPTS, SHORT)] == RIGHT
    eager.close()
    assert state_of(target) == before


@pytest.mark.slow
def test_values_that_were_written_meanwhile_stay(graphs_on_cpu: list[Replayed]) -> None:  # noqa: F811
    """An optimiser that was made before wrapping holds the parameters that the engine reads."""
    target, other = tiny_llama(), tiny_llama(seed=3)
    held = list(target.parameters())
    model = with_graphs(None, target, num_speculative_tokens=0, max_num_seqs=3)
    with torch.no_grad():
        for own, new in zip(held, other.parameters(), strict=True):
            own.copy_(new)
    assert [c.token_ids for c in model.generate(PROMPTS, SHORT)] == [hf_greedy(p, 12, seed=3) for p in PROMPTS]
    model.close()
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), other.parameters(), strict=True))
    assert all(a is b for a, b in zip(target.parameters(), held, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["assigned", pytest.param("copied", marks=pytest.mark.long)])
def test_projections_that_were_moved_are_fused_anew(graphs_on_cpu: list[Replayed], how: str) -> None:  # noqa: F811
    """ModelChangedError tells the user to wrap the model again; compiled code must not read the old fused tensor."""
    target = tiny_llama()
    first = with_graphs(None, target, num_speculative_tokens=0, max_num_seqs=3)
    if how == "assigned":
        target.load_state_dict(tiny_llama(seed=3).state_dict(), assign=True)
    else:
        target = copy.deepcopy(target)
        target.load_state_dict(tiny_llama(seed=3).state_dict())
    second = with_graphs(None, target, num_speculative_tokens=0, max_num_seqs=3)
    siblings = [m for m in target.modules() if isinstance(m, SiblingLinear)]
    assert len(siblings) == 5 * 4
    for layer in siblings:
        assert torch.equal(layer.fused_weight[layer.rows], layer.weight)
    first.close()
    assert num_siblings(target) == 5 * 4
    assert [c.token_ids for c in second.generate(PROMPTS, SHORT)] == [hf_greedy(p, 12, seed=3) for p in PROMPTS]
    second.close()
    assert num_siblings(target) == 0


@pytest.mark.slow
def test_hooks_and_parameters_of_the_user_stay_while_fused(graphs_on_cpu: list[Replayed]) -> None:  # noqa: F811
    target, seen = tiny_llama(), []

    def hook(*args: Any) -> None:
        seen.append(args)

    hook.__module__ = "peft"  # no graphs are captured over hooks of which nobody knows what they read
    target.model.layers[1].self_attn.q_proj.register_forward_hook(hook)
    model = with_graphs(None, target, num_speculative_tokens=0, max_num_seqs=3)
    seen.clear()
    with torch.no_grad():
        target(torch.tensor([PROMPTS[0]]))
    assert len(seen) == 1
    model.close()
    assert hooks_of(target.model.layers[1].self_attn.q_proj) == (1, 0)
