"""Closed, dropped, wrapped twice or not built at all: nothing stays on the user's model or in memory."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import LetterTokenizer, eagle3_head, hf_greedy, hooks_of, random_prompts, table_head, tiny_llama, wrap
from torch._subclasses.fake_tensor import FakeTensor

from specdec import (
    CacheTooSmallError,
    ClosedModelError,
    InvalidInputError,
    SamplingParams,
    SpecdecError,
    SpeculativeModel,
)
from specdec.engine import sharing
from specdec.wrapped.group import Group
from tests.hybrids import tiny_hybrid

pytestmark = pytest.mark.usefixtures("every_self_test")

PROMPTS = random_prompts((5, 33, 17))
SHORT = SamplingParams(max_new_tokens=12)
RIGHT = [hf_greedy(prompt, 12) for prompt in PROMPTS]
LONG = SamplingParams(max_new_tokens=80)


def state_of(model: torch.nn.Module) -> list[Any]:
    """All that could have been changed on a model: modules, classes, hooks, attributes, parameters and their memory."""
    modules = [(name, id(m), type(m), sorted(vars(m)), hooks_of(m), m.training) for name, m in model.named_modules()]
    parameters = [
        (name, id(p), p.stride(), p.untyped_storage().nbytes(), p.requires_grad, p.detach().numpy().tobytes())
        for name, p in model.named_parameters()
    ]
    return [modules, parameters, repr(model.config)]


def num_hooks(model: torch.nn.Module) -> int:
    return sum(sum(hooks_of(m)) for m in model.modules())


def tensor_bytes() -> int:
    """Bytes of all tensors that are alive; the compiler's, of other tests, have none."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and not issubclass(type(x), FakeTensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """What the first engine of a process leaves for all (constants of libraries) is no leak."""
    with wrap(tiny_llama(), table_head(tiny_llama()), num_speculative_tokens=3) as model:
        model.generate(PROMPTS, SHORT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [eagle3_head, *(pytest.param(make, marks=pytest.mark.long) for make in (table_head, lambda model: None))],
    ids=["eagle3", "table", "no head"],
)
@pytest.mark.thorough
def test_three_times_wrapped_and_closed_leaves_nothing(make: Callable[[Any], Any]) -> None:
    target = tiny_llama()
    head = make(target)
    before, memory = state_of(target), tensor_bytes()
    for _ in range(3):
        model = wrap(target, head, num_speculative_tokens=3 if head else 0)
        assert num_hooks(target) > 0
        assert tensor_bytes() > memory + 50_000
        assert [c.token_ids for c in model.generate(PROMPTS, SHORT)] == RIGHT
        model.close()
        assert state_of(target) == before
        assert num_hooks(target) == 0
        assert tensor_bytes() == memory, "with the closed model still in hand"
    ids = torch.tensor([PROMPTS[0]])
    own = target.generate(ids, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))
    assert own[0, len(PROMPTS[0]) :].tolist() == RIGHT[0]


@pytest.mark.slow
@pytest.mark.thorough
def test_three_models_made_over_one_and_dropped_leave_nothing() -> None:
    target = tiny_llama()
    head = table_head(target)
    before, memory = state_of(target), tensor_bytes()
    for _ in range(3):
        wrap(target, head, num_speculative_tokens=3).generate(PROMPTS, SHORT)
    gc.collect()
    assert state_of(target) == before
    assert tensor_bytes() == memory


@pytest.mark.slow
def test_a_stream_keeps_its_engine_and_nobody_else_does() -> None:
    target = tiny_llama()
    stream = wrap(target, table_head(target), num_speculative_tokens=3).stream(PROMPTS, SHORT)
    gc.collect()
    done = {u.index: u.completion.token_ids for u in stream if u.completion is not None}
    assert [done[i] for i in range(3)] == RIGHT
    del stream
    gc.collect()
    assert num_hooks(target) == 0


@pytest.mark.slow
def test_a_dropped_model_does_not_keep_the_target() -> None:
    tiny_llama(seed=5)  # the fakes keep one to copy
    memory = tensor_bytes()
    wrap(tiny_llama(seed=5)).generate(PROMPTS[0], SHORT)
    assert tensor_bytes() == memory
    wrap(tiny_llama(seed=5)).close()
    assert tensor_bytes() == memory


def test_an_engine_that_cannot_be_built_leaves_nothing() -> None:
    target = tiny_llama()
    before = state_of(target)
    with pytest.raises(CacheTooSmallError) as info:
        wrap(target, table_head(target), num_speculative_tokens=2, kv_cache_tokens=12)
    assert state_of(target) == before, "while the error is still in hand"
    assert info.value is not None


def inference_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) and x.is_inference() for x in gc.get_objects())


@pytest.mark.slow
def test_a_model_made_in_inference_mode_is_one_made_outside() -> None:
    """Buffers made in inference mode could not be written outside of it, where CUDA graphs are captured."""
    target = tiny_llama()
    head, before = eagle3_head(target), inference_tensors()
    with torch.inference_mode():
        model = wrap(target, head, num_speculative_tokens=3)
        assert inference_tensors() == before
        assert [c.token_ids for c in model.generate(PROMPTS, SHORT)] == RIGHT
    with model:
        assert [c.token_ids for c in model.generate(PROMPTS, SHORT)] == RIGHT


def test_a_with_block_closes_and_closing_twice_is_one() -> None:
    with wrap(tiny_llama()) as model:
        assert isinstance(model, SpeculativeModel)
        assert model.generate(PROMPTS[0], SHORT)[0].token_ids == RIGHT[0]
        rounds = model.engine_stats.rounds
    model.close()
    assert model.engine_stats.rounds == rounds > 0
    assert model.config.max_num_seqs == 3 and model.hf_model is not None and "error" not in model.backend_name


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before memory is freed", "before the model is restored"])
@pytest.mark.cases(1)
def test_an_interrupted_close_is_finished_by_the_next(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    target = tiny_llama()
    before, memory = state_of(target), tensor_bytes()
    model = wrap(target)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if when == "before memory is freed":
            patch.setattr(Group, "close", interrupted)
        else:
            patch.setattr(gc, "collect", interrupted)
        model.close()
    model.close()
    assert state_of(target) == before
    assert tensor_bytes() == memory


@pytest.mark.slow
@pytest.mark.thorough
def test_modules_of_latent_attention_and_a_prediction_module() -> None:
    with SpeculativeModel.from_pretrained("gsm-deepseek", draft="mtp") as model:
        target = model.hf_model
        right = model.generate(PROMPTS[0], SHORT)[0].token_ids
    assert num_hooks(target) == 0
    assert not [m for m in target.modules() if {"expand_kv", "_specdec_layer"} & set(vars(m))]
    with SpeculativeModel.from_pretrained(target, tokenizer=model.tokenizer) as again:
        assert again.generate(PROMPTS[0], SHORT)[0].token_ids == right
    assert num_hooks(target) == 0


@pytest.mark.slow
def test_an_error_goes_through_the_with_block() -> None:
    target = tiny_llama()
    with pytest.raises(ZeroDivisionError), wrap(target):
        raise ZeroDivisionError
    assert num_hooks(target) == 0


USES: dict[str, Callable[[Any], object]] = {
    "generate": lambda model: model.generate(PROMPTS, SHORT),
    "generate_iter": lambda model: next(model.generate_iter(PROMPTS, SHORT)),
    "stream": lambda model: model.stream(PROMPTS, SHORT),
    "refresh": lambda model: model.refresh(),
    "describe": lambda model: model.describe(),
    "head": lambda model: model.head,
    "target": lambda model: model.target,
}


@pytest.fixture(scope="module")
def closed() -> Any:
    model = wrap(tiny_llama())
    model.close()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_a_closed_model_says_so(use: str, closed: Any) -> None:
    with pytest.raises(ClosedModelError, match="this SpeculativeModel is closed"):
        USES[use](closed)
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        closed.generat  # noqa: B018


@pytest.mark.slow
def test_a_running_stream_is_told_after_what_it_got() -> None:
    model = wrap(tiny_llama(), table_head(tiny_llama()), num_speculative_tokens=3, max_num_seqs=5)
    fast, slow, unread = model.stream(PROMPTS, LONG), model.stream(PROMPTS[0], LONG), model.stream(PROMPTS[1], LONG)
    got = [next(fast), next(slow)]
    for _ in range(20):
        got.append(next(fast))
    model.close()
    waiting = []
    with pytest.raises(ClosedModelError, match="was closed while this request was running"):
        for update in slow:
            waiting.append(update)
    assert waiting, "rounds of the other stream brought updates for this one, which are not lost"
    tokens = got[1].token_ids + [t for update in waiting for t in update.token_ids]
    assert tokens == hf_greedy(PROMPTS[0], 80)[: len(tokens)]
    with pytest.raises(ClosedModelError, match="is closed; wrap its hf_model again"):
        next(unread)
    assert list(slow) == [] == list(unread), "an iterator that raised is at its end"
    fast.close()


@pytest.mark.slow
def test_calls_on_other_threads_are_told() -> None:
    """One of them is inside a round, which `close` waits for. All read one update, and then none until it is closed."""
    inside, finish, closed, errors = threading.Event(), threading.Event(), threading.Event(), []

    class Tokenizer(LetterTokenizer):
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            inside.set()
            assert finish.wait(60)
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    target = tiny_llama()
    model = wrap(target, tokenizer=Tokenizer())

    def call(prompt: list[int]) -> None:
        try:
            for _ in model.stream(prompt, LONG):
                assert closed.wait(60)
        except ClosedModelError as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(prompt,)) for prompt in PROMPTS[:3]]
    closer = threading.Thread(target=model.close)
    threads[0].start()
    assert inside.wait(60)
    for thread in (*threads[1:], closer):
        thread.start()
    closer.join(0.2)
    assert closer.is_alive(), "a round is running"
    finish.set()
    closer.join(60)
    closed.set()
    for thread in (*threads, closer):
        thread.join(60)
        assert not thread.is_alive()
    assert len(errors) == 3
    assert num_hooks(target) == 0


def test_closing_inside_a_round_is_refused_and_harms_nothing() -> None:
    refused = []

    class Tokenizer(LetterTokenizer):
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            if not refused:
                with pytest.raises(SpecdecError, match="from inside one of its own rounds") as info:
                    model.close()
                refused.append(info.value)
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    model = wrap(tiny_llama(), tokenizer=Tokenizer())
    assert model.generate(PROMPTS[0], SHORT)[0].token_ids == RIGHT[0]
    assert refused


@pytest.mark.slow
@pytest.mark.thorough
def test_two_models_over_one_target_work_and_end_apart() -> None:
    target = tiny_llama()
    before = state_of(target)
    first = wrap(target, table_head(target), num_speculative_tokens=3)
    second = wrap(target, eagle3_head(target), num_speculative_tokens=2)
    streams = first.stream(PROMPTS, SHORT), second.stream(PROMPTS, SHORT)
    done: list[dict[int, list[int]]] = [{}, {}]
    left = [0, 1]
    while left:
        for i in list(left):
            update = next(streams[i], None)
            if update is None:
                left.remove(i)
            elif update.completion is not None:
                done[i][update.index] = update.completion.token_ids
    assert [[d[i] for i in range(3)] for d in done] == [RIGHT, RIGHT]
    first.close()
    assert [c.token_ids for c in second.generate(PROMPTS, SHORT)] == RIGHT
    assert second.refresh() < 1e-3
    third = wrap(target)
    second.close()
    assert [c.token_ids for c in third.generate(PROMPTS, SHORT)] == RIGHT
    third.close()
    assert state_of(target) == before


@pytest.mark.slow
def test_a_head_outlives_the_model_that_it_drafted_for() -> None:
    target = tiny_llama()
    head = eagle3_head(target)
    before, drafts = state_of_head(head), []
    for _ in range(2):
        with wrap(target, head, num_speculative_tokens=3) as model:
            drafts.append([c.drafts for c in model.generate(PROMPTS, SamplingParams(12, return_drafts=True))])
        assert state_of_head(head) == before
    assert drafts[0] == drafts[1]


def state_of_head(head: Any) -> list[Any]:
    return [(name, id(m), type(m), sorted(vars(m))) for name, m in head.named_modules()]


@pytest.mark.slow
def test_a_stream_that_is_open_when_the_program_ends_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's names are gone before a stream that a script still holds."""
    with wrap(tiny_llama()) as model:
        stream = model.stream(PROMPTS[0], SHORT)
        next(stream)
        with monkeypatch.context() as gone:
            for name in [name for name in vars(sharing) if not name.startswith("__")]:
                gone.setattr(sharing, name, None)
            gone.setattr(sys, "is_finalizing", lambda: True)
            stream.__del__()
        assert [token for update in stream for token in update.token_ids]  # nothing was ended


@pytest.mark.slow
def test_own_logits_of_what_are_no_token_ids_and_of_a_tensor() -> None:
    with wrap(tiny_llama()) as model:
        for ids in ("hi", [], [0.5], [[1, 2]], [10**6], torch.tensor([[1, 2]])):
            words = r"own_logits: give at least one token id.*one sequence of integers"
            with pytest.raises(InvalidInputError, match=words):
                model.own_logits(ids)
        assert torch.equal(model.own_logits(torch.tensor([1, 2, 3])), model.own_logits([1, 2, 3]))


def tiny_of(kind: str) -> Any:
    return tiny_llama() if kind == "llama" else tiny_hybrid(kind)


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(("llama", way) for way in ("pickle", "torch.save", "deepcopy")),
        pytest.param("qwen3_next", "deepcopy", marks=pytest.mark.slow),
        *(pytest.param("qwen3_next", way, marks=pytest.mark.long) for way in ("pickle", "torch.save")),
    ],
)
@pytest.mark.cases(1)
def test_a_wrapped_model_pickles_without_its_engine(kind: str, way: str) -> None:
    """hf_model belongs to the user: what is read back is the plain model, and can be wrapped anew."""
    model = tiny_of(kind)
    head = table_head(model) if kind == "llama" else None
    options = {"num_speculative_tokens": 3} if head else {"max_model_len": 64}
    wrapped, ids = wrap(model, head, **options), torch.tensor(PROMPTS[:1])
    right = [c.token_ids for c in wrapped.generate(PROMPTS, SHORT)]
    file = io.BytesIO()
    if way == "pickle":
        copied = pickle.loads(pickle.dumps(wrapped.hf_model))
    elif way == "torch.save":
        torch.save(wrapped.hf_model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    else:
        copied = copy.deepcopy(wrapped.hf_model)
    with torch.no_grad():
        assert torch.equal(copied(ids).logits, model(ids).logits)
    assert [c.token_ids for c in wrapped.generate(PROMPTS, SHORT)] == right
    wrapped.close()
    again = wrap(copied, head, **options)
    assert [c.token_ids for c in again.generate(PROMPTS, SHORT)] == right
    assert copied.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > ids.shape[1]
