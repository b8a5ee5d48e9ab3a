"""Rounds from CUDA graphs on a GPU: the eager path's tokens and drafts, and no synchronisation but the round's read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fakes import count_calls, engine_of, keep_gpu_busy
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from attention.backends.flashinfer.short_queries import PackedKernel
from benchmarks.trace import SYNCHRONISE, traced
from benchmarks.workload import Load
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.spec import Eagle3Spec
from specdec.errors import RoundFailedError
from specdec.execution.base import DraftedVerification, Verification
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from tests.agreement import agreement, drafted
from tests.specdec.execution.mixed import mixed_rounds
from tests.specdec.execution.test_transfers import full_rounds

CUDA = torch.device("cuda")
VOCAB = 512
LENGTHS = (5, 33, 17, 300, 64)
PROMPTS = [torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


class Tokenizer:
    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return ""


def pair(dtype: torch.dtype) -> tuple[LlamaForCausalLM, Eagle3Head]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    target = LlamaForCausalLM(config).eval().requires_grad_(False)
    head = decided(target)
    return target.to(CUDA, dtype), head.to(CUDA, dtype)


def decided(target: Any) -> Eagle3Head:
    """A head for a target of this width; both get clear winners: rounding of half precision decides few tokens."""
    target.lm_head.weight.mul_(20)
    spec = Eagle3Spec(
        hidden_size=256,
        target_hidden_size=256,
        intermediate_size=512,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        aux_layers=(2, 4, 5),
    )
    head = Eagle3Head(spec, target.get_input_embeddings().weight).eval().requires_grad_(False)
    head.lm_head.weight.mul_(20)
    return head


def model(drafts: int, graphs: bool, **options: Any) -> SpeculativeModel:
    target, head = pair(torch.float16)
    return SpeculativeModel.from_pretrained(
        target,
        head if drafts else None,
        num_speculative_tokens=drafts or None,
        backend="flashinfer",
        tokenizer=Tokenizer(),
        max_num_seqs=4,
        max_model_len=512,
        cuda_graphs=graphs,
        **options,
    )


def test_target_draft_prefill_and_draft_step_are_each_compiled_once() -> None:
    """For rounds of one shape, of any shape, and rows of every number, one included."""
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    with model(3, True) as loaded:
        loaded.generate(PROMPTS, SamplingParams(max_new_tokens=8, ignore_eos=True))
        loaded.generate(PROMPTS[:1], SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=1.0))
    assert counters["stats"]["unique_graphs"] - before == 3


@pytest.mark.parametrize(("drafts", "layout"), [(0, "NHD"), (1, "NHD"), (5, "NHD"), (5, "HND")])
def test_graphs_give_the_eager_tokens_and_drafts(drafts: int, layout: str) -> None:
    """In either layout, those of the eager path in the default one."""
    params = SamplingParams(max_new_tokens=48, return_drafts=True)
    eager = model(drafts, False).generate(PROMPTS, params)
    graphed = model(drafts, True, kv_cache_layout=layout).generate(PROMPTS, params)
    assert agreement([c.token_ids for c in graphed], [c.token_ids for c in eager]) >= 0.97
    if drafts:
        assert agreement(drafted(graphed), drafted(eager)) >= 0.97


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_packed_attention_gives_the_eager_tokens_and_drafts(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    params = SamplingParams(max_new_tokens=48, return_drafts=True)
    eager = model(5, False).generate(PROMPTS, params)
    launches = count_calls(monkeypatch, PackedKernel, "run")
    graphed = model(5, True, kv_cache_layout=layout).generate(PROMPTS, params)
    assert {4 * 6, 4} <= {len(query) for query, *_ in launches}  # verifications and draft steps
    assert agreement([c.token_ids for c in graphed], [c.token_ids for c in eager]) >= 0.97
    assert agreement(drafted(graphed), drafted(eager)) >= 0.97


def test_a_round_launched_before_the_last_is_read_never_synchronises(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = model(0, True)
    go_on = steady(wrapped, 6)
    executor: Any = wrapped.engine.executor
    followed = []
    plain = strict(executor.launch_next)
    monkeypatch.setattr(executor, "launch_next", lambda *args: (followed.append(1), plain(*args))[1])
    go_on()
    assert len(followed) == 5  # of 6: the round in flight was verified before, and holds the plain method


def steady(wrapped: SpeculativeModel, rounds: int) -> Callable[[], int]:
    """Brings one request past its prompt; returns what runs `rounds` further rounds."""
    updates = wrapped.stream([PROMPTS[1]], SamplingParams(max_new_tokens=200))
    for _ in range(4):
        next(updates)

    def go_on() -> int:
        for _ in range(rounds):
            next(updates)
        return rounds

    return go_on


def test_sending_and_launching_never_synchronise(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = model(5, True)
    go_on = steady(wrapped, 6)
    executor: Any = wrapped.engine.executor
    called = set()
    for name in ("send", "verify", "_draft_on"):
        plain = strict(getattr(executor, name))
        monkeypatch.setattr(executor, name, lambda *args, name=name, plain=plain: (called.add(name), plain(*args))[1])
    go_on()
    assert called == {"send", "verify", "_draft_on"}


def test_reading_lengths_back_before_planning_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    wrapped = model(5, True)
    go_on = steady(wrapped, 6)
    executor: Any = wrapped.engine.executor
    lengths = torch.zeros(4, device=CUDA)
    plain = executor.send
    monkeypatch.setattr(executor, "send", strict(lambda *args: (lengths.cpu(), plain(*args))[1]))
    with pytest.raises(RoundFailedError, match="synchroniz"):
        go_on()


def replace_drafting(monkeypatch: pytest.MonkeyPatch, wrapped: SpeculativeModel, drafting: Callable[..., Any]) -> None:
    """From now on `drafting(launch_steps, *args)` runs in place of each verification's `launch_steps(*args)`."""
    executor: Any = wrapped.engine.executor
    verify = executor.verify

    def verified(*args: Any) -> Verification:
        verification = verify(*args)
        if not isinstance(verification, DraftedVerification):
            return verification
        return replace(verification, launch_steps=partial(drafting, verification.launch_steps))

    monkeypatch.setattr(executor, "verify", verified)


def test_the_draft_loop_is_launched_in_a_millisecond_behind_a_slow_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in it waits for the device: 20 ms of work stand in front of it."""
    wrapped = model(5, True)
    go_on = steady(wrapped, 8)
    seconds: list[float] = []

    def behind_a_slow_kernel(launch_steps: Any, *args: Any) -> Any:
        keep_gpu_busy(int(20e-3 * torch.cuda.get_device_properties(CUDA).clock_rate * 1e3))
        started = time.perf_counter()
        drafted = launch_steps(*args)
        seconds.append(time.perf_counter() - started)
        return drafted

    replace_drafting(monkeypatch, wrapped, behind_a_slow_kernel)
    started = time.perf_counter()
    go_on()
    assert time.perf_counter() - started > 8 * 15e-3  # the kernel was slow indeed
    assert sorted(seconds)[len(seconds) // 2] < 1e-3


def test_plans_made_behind_a_slow_kernel_draft_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_new_tokens=32, return_drafts=True)
    plain = model(5, True).generate(PROMPTS, params)
    wrapped = model(5, True)

    def behind_a_slow_kernel(launch_steps: Any, *args: Any) -> Any:
        keep_gpu_busy(10_000_000)
        return launch_steps(*args)

    replace_drafting(monkeypatch, wrapped, behind_a_slow_kernel)
    slow = wrapped.generate(PROMPTS, params)
    assert [c.token_ids for c in slow] == [c.token_ids for c in plain]
    assert [c.drafts for c in slow] == [c.drafts for c in plain]


def strict(call: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watched


KINDS = ("greedy", "sampled", "mixed", "mixed and sampled")
TRACED = 8


@contextmanager
def rounds_of(kind: str, wrapped: SpeculativeModel) -> Iterator[Callable[[], int]]:
    """What makes TRACED rounds, all of one kind; as many were made before (kernels, graphs of every bucket)."""
    share = float("sampled" in kind)
    rows = Load(2, (17, 33), (200, 200), sampled_share=share).arrivals(VOCAB)
    prompts = Load(1, (300, 300), (4, 4), sampled_share=share).arrivals(VOCAB)
    some = mixed_rounds if "mixed" in kind else full_rounds
    with some(engine_of(wrapped), rows, prompts, TRACED) as go_on:
        go_on()
    with some(engine_of(wrapped), rows, prompts, TRACED) as go_on:
        yield go_on


@pytest.fixture(scope="module")
def traced_model() -> Iterator[SpeculativeModel]:
    """Room for the prompts of a mixed trace: each of 300 tokens is read in ten rounds, two rows decode beside it. The
    same prompt comes again and again, so nothing of it may be cached."""
    with model(5, True, max_num_prefill_tokens=32, enable_prefix_caching=False) as wrapped:
        yield wrapped


@pytest.mark.parametrize("kind", KINDS)
def test_the_trace_of_a_round_holds_one_read_and_nothing_else_that_waits(
    kind: str, traced_model: SpeculativeModel
) -> None:
    """Two host-to-device copies of ours, one more with sampled rows and one with prompts; those of plans; one back."""
    executor = traced_model.engine.executor
    with rounds_of(kind, traced_model) as go_on:
        before = executor.transfers
        found = traced(go_on)
        sent = (executor.transfers - before) / found["rounds"]
    waits = {name: found["synchronisations"].get(name, 0.0) for name in SYNCHRONISE}
    assert waits["cudaEventSynchronize"] <= 1.0, found["synchronisations"]  # the read
    assert waits["cudaStreamSynchronize"] == 0, found["synchronisations"]
    assert waits["cudaDeviceSynchronize"] <= 1 / TRACED  # the profiler's own, at its end
    assert sum(n for name, n in found["copies"].items() if "DtoH" in name) == 1.0, found["copies"]
    assert not any("Pageable" in name for name in found["copies"] if "HtoD" in name or "DtoH" in name)
    assert sent == 2.0 + ("sampled" in kind) + ("mixed" in kind)
    arrived = sum(n for name, n in found["copies"].items() if "HtoD" in name)
    assert sent <= arrived <= sent + PLANS, found["copies"]
    if kind == "greedy":
        assert found["graph_replays"] == 6.0  # verification, draft prefill, four steps
    if kind == "sampled":
        assert found["graph_replays"] == 6.0 + 1.0  # and the decision; drafts are drawn in the graph of their pass


PLANS = 2 * (1 + 1 + 4)
"""At most: verification, draft prefill and four steps are planned, each for up to two kernels, a copy each."""


@pytest.mark.parametrize("kind", KINDS[1:])
def test_sending_and_launching_such_rounds_never_synchronise(
    kind: str, traced_model: SpeculativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: Any = traced_model.engine.executor
    called = set()
    with rounds_of(kind, traced_model) as go_on:
        for name in ("send", "verify", "_draft_on"):
            plain = strict(getattr(executor, name))
            monkeypatch.setattr(
                executor, name, lambda *args, name=name, plain=plain: (called.add(name), plain(*args))[1]
            )
        go_on()
        monkeypatch.undo()
    assert called == {"send", "verify", "_draft_on"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_read_in_a_round_is_seen_by_the_trace(
    kind: str, traced_model: SpeculativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: lengths are read back before a verification is launched."""
    executor: Any = traced_model.engine.executor
    lengths, plain = torch.zeros(4, device=CUDA), executor.verify
    with rounds_of(kind, traced_model) as go_on:
        monkeypatch.setattr(executor, "verify", lambda *args: (lengths.cpu(), plain(*args))[1])
        found = traced(go_on)
        monkeypatch.undo()
    assert sum(n for name, n in found["copies"].items() if "DtoH" in name) >= 1.5
    assert found["synchronisations"].get("cudaStreamSynchronize", 0.0) >= 0.5
