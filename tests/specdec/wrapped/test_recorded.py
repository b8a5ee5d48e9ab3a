"""Recorded steps: the tokens of live ones, what is not recorded, and recordings that a change of the model ends."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fakes import TINY, eagle3_head, random_prompts, tiny_llama, wrap
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.auto import AutoModelForCausalLM

from specdec import SamplingParams
from specdec.selftest.twin import enlarge
from specdec.wrapped import recorded
from specdec.wrapped.recorded import NotRecordableError, RecordedSteps, record

NEW = 14
PROMPTS = random_prompts((9, 4, 17, 6, 11), 3)


@pytest.fixture(autouse=True)
def no_steps_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_LIVE_STEPS", 0)


def answers(wrapped: Any, seed: int | None = None, **options: Any) -> list[list[int]]:
    sampled = {} if seed is None else {"temperature": 0.8, "seed": seed}
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, **sampled, **options)
    return [completion.token_ids for completion in wrapped.generate(PROMPTS, params)]


def model_of(kind: str) -> Any:
    if kind == "llama":
        return tiny_llama()
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**TINY, "vocab_size": 64})).eval()
    enlarge(model)
    return model


def used(wrapped: Any) -> int:
    """Shapes of which steps come from a recording."""
    return sum(shape.is_checked for shape in wrapped.target.steps.shapes.values())


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize(
    "kind",
    ["llama", *(pytest.param(k, marks=pytest.mark.thorough) for k in ("mixtral", "gemma2", "gemma3_text", "cohere"))],
)
def test_tokens_and_drafts_are_those_of_live_steps(kind: str, num_drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for reason in ("", "live"):
        if reason:
            monkeypatch.setattr(recorded, "unseen_state", lambda model: "live")
        model = model_of(kind)
        head: Any = eagle3_head(model) if num_drafts and kind == "llama" else None
        draft = head or ("lookup" if num_drafts else None)
        with wrap(model, draft, num_speculative_tokens=num_drafts, cpu_linears="packed", max_num_seqs=3) as wrapped:
            found.append([answers(wrapped), answers(wrapped), answers(wrapped, seed=5), wrapped.engine_stats.rounds])
            assert wrapped.describe()["recorded_steps"] == (reason or "up to 64 tokens")
            assert (used(wrapped) > 2) != bool(reason)
    assert found[0] == found[1]


def test_a_recording_has_few_names_and_each_value_its_own_while_it_is_used() -> None:
    """Values that live long beside short ones, several results of one operator, and results that nobody uses."""
    torch.manual_seed(0)
    weight = torch.randn(6, 6)

    def forward(attend: Any, x: Tensor, y: Tensor) -> Tensor:
        kept, total = x @ weight, y * 2
        for step in range(60):
            left, right = (total + step / 10).split(3, 1)
            x.neg()
            total = torch.cat([right.sin(), left.cos()], 1) * weight[0] + kept
        return attend(0, total, x, y, None) - kept

    attend: Any = lambda layer, query, key, value, sinks: query * 3 + key - value  # noqa: E731
    given = [torch.randn(4, 6) for _ in range(2)]
    output, recording = record(lambda how: forward(how, *given), given, attend)
    assert torch.equal(output, forward(attend, *given))
    others = [torch.randn(4, 6) for _ in range(2)]
    assert torch.equal(recording(attend, *others), forward(attend, *others))
    code: Any = recording
    assert code.func.__code__.co_nlocals < 20


def test_a_model_whose_python_reads_values_stays_live() -> None:
    torch.manual_seed(2)
    sizes = {**TINY, "vocab_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **sizes)).eval()
    model.set_experts_implementation("eager")
    enlarge(model)
    with wrap(copy.deepcopy(model)) as plain:
        right = answers(plain)
    with wrap(model, cpu_linears="packed") as wrapped:
        assert answers(wrapped) == right
        assert wrapped.describe()["recorded_steps"].startswith("the model's Python depends on values (aten.")


@pytest.mark.parametrize(
    "change",
    ["assigned", *(pytest.param(c, marks=pytest.mark.thorough) for c in ("in place", "norm", "hook", "setting"))],
)
def test_a_change_between_calls_counts(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check, which is planted, those in place alone would: their memory is the same."""
    for planted in (False, True):
        if planted:
            monkeypatch.setattr(RecordedSteps, "check", lambda self: None)
        model = tiny_llama()
        with wrap(model, cpu_linears="packed", enable_prefix_caching=False) as wrapped:
            before = answers(wrapped)
            assert answers(wrapped) == before and used(wrapped)
            made_to(model, change)
            changed = answers(wrapped)
            wrapped.target.steps = None
            right = answers(wrapped)
        assert right != before
        assert (changed == right) == (not planted or change in ("in place", "norm")), planted


def made_to(model: Any, change: str) -> None:
    layer = model.model.layers[1]
    with torch.no_grad():
        if change == "in place":
            layer.mlp.up_proj.weight.mul_(-3)
        elif change == "norm":
            layer.input_layernorm.weight.mul_(-3)
        elif change == "assigned":
            layer.input_layernorm.weight = nn.Parameter(-3 * layer.input_layernorm.weight)
        elif change == "hook":
            layer.mlp.register_forward_hook(lambda module, given, output: -9 * output)
        else:
            layer.input_layernorm.variance_epsilon = 40.0


def test_a_hook_with_a_state_of_its_own_is_called_in_each_step() -> None:
    strength = [1.0]
    model = tiny_llama()
    model.model.layers[1].mlp.register_forward_hook(lambda module, given, output: strength[0] * output)
    with wrap(model, cpu_linears="packed", enable_prefix_caching=False) as wrapped:
        before = answers(wrapped)
        assert "a forward hook on model.layers.1.mlp" in wrapped.describe()["recorded_steps"]
        strength[0] = -9.0
        assert answers(wrapped) != before


def test_weights_that_are_written_between_two_steps_count_in_the_next() -> None:
    """Packed weights move when they are written; recordings read them where they were."""

    def tokens(steps: bool) -> list[int]:
        model = tiny_llama()
        with wrap(model, cpu_linears="packed") as wrapped:
            answers(wrapped)
            wrapped.target.steps = wrapped.target.steps if steps else None
            found = []
            for update in wrapped.stream([PROMPTS[0]], SamplingParams(max_new_tokens=NEW, ignore_eos=True)):
                found += update.token_ids
                if len(found) == 6:
                    with torch.no_grad():
                        model.model.layers[0].mlp.up_proj.weight.mul_(-3)
            return found

    assert tokens(True) == tokens(False) != answers(wrap(tiny_llama()))[0]


def test_new_weights_leave_no_second_copy_of_packed_ones() -> None:
    """Recordings hold the weights' memory: they go before it is replaced."""
    model = tiny_llama()
    with wrap(model, cpu_linears="packed") as wrapped:
        answers(wrapped)
        assert used(wrapped)
        matrix: Any = model.lm_head.weight.matrix
        before, copies = weakref.ref(matrix.memory), list[bool]()
        new = ((name, tensor) for name, tensor in tiny_llama(seed=1).state_dict().items())
        wrapped.update_weights(looked_at(new, lambda: copies.append(before() is not None)))
        assert copies[0] and not copies[-1]


def looked_at(weights: Iterator[Any], look: Any) -> Iterator[Any]:
    for each in weights:
        yield each
        look()


def test_a_recording_that_computes_something_else_is_not_used() -> None:
    """Planted: Python that decides by how often it was called, of which no tensor tells."""
    model, calls = tiny_llama(), [0]

    class Alternating(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls[0] += bool(calls[0])
            return -x if calls[0] % 2 else x

    model.model.layers[1].mlp.act_fn = Alternating().eval()
    with wrap(model, cpu_linears="packed") as wrapped:
        calls[0] = 2
        answers(wrapped)
        assert wrapped.describe()["recorded_steps"].startswith("a recording computed other numbers")


def test_long_steps_and_shapes_that_no_longer_come_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_MOST_SHAPES", 3)
    sizes = {"enable_prefix_caching": False, "max_num_batched_tokens": 128}
    with wrap(tiny_llama(), cpu_linears="packed", **sizes) as wrapped:
        for length in (70, 3, 4, 5, 6, 70):
            wrapped.generate([[7] * length], SamplingParams(max_new_tokens=1))
        shapes = wrapped.target.steps.shapes
        assert [key[0] for key in shapes] == [4, 5, 6]


def attended(layer: int, query: Tensor, *states: Any) -> Tensor:
    return query * (layer + 2)


def test_a_function_is_recorded_with_its_views_writes_lists_and_attention() -> None:
    table, memory = torch.arange(12.0).view(6, 2), torch.zeros(3)

    def forward(ids: Tensor, scale: Tensor, attend: Any) -> Tensor:
        rows = table[ids]
        left, right = rows.split([1, 1], -1)
        memory[:2].copy_(left[:2, 0])
        rows.add_(1).mul_(scale)
        return torch.cat([attend(3, rows, rows, rows, None), left * float("inf"), right], -1)

    first, second = (torch.tensor(ids) for ids in ([1, 4], [5, 0]))
    scale, other = torch.tensor(2.0), torch.tensor(-1.5)
    _, made = record(lambda attend: forward(first, scale, attend), (first, scale), attended)
    right = forward(second, other, attended)
    kept = memory.clone()
    memory.zero_()
    assert torch.equal(made(attended, second, other), right) and torch.equal(memory, kept)
    table.neg_()
    assert torch.equal(made(attended, second, other), forward(second, other, attended))


def by_value() -> Iterator[tuple[str, Any]]:
    yield "item", lambda x: x * x.sum().item()
    yield "if", lambda x: -x if x.sum() > 0 else x
    yield "nonzero", lambda x: x.nonzero()
    yield "mask", lambda x: x[x > 0]
    yield "mask of bytes", lambda x: torch.ops.aten.index.Tensor(x, [(x > 0).to(torch.uint8)])
    yield "noise", lambda x: x * torch.rand(3)
    yield "none", lambda x: x


@pytest.mark.parametrize(("name", "function"), list(by_value()))
def test_what_depends_on_values_is_not_recorded(name: str, function: Any) -> None:
    x = torch.tensor([1.0, -2.0, 3.0])
    with pytest.raises(NotRecordableError):
        record(lambda attend: function(x), (x,), attended)
