"""Requests that move: read by one engine, continued by another, as if they had never moved."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import (
    EOS,
    LetterTokenizer,
    eagle3_head,
    engine_of,
    free_everywhere,
    guests_of,
    late_pages,
    launch_ahead,
    random_prompts,
    scheduler_of,
    table_head,
    tiny_llama,
    wrap,
    wrong_rounds,
)

import attention.transport.transports
from attention.errors import HandoffMismatchError, TransferError, TransferTimeoutError
from attention.recurrence.index import FoldRule
from attention.transport.region_tables import VERSION
from specdec import Handoff, SamplingParams
from specdec.errors import (
    CacheTooSmallError,
    InvalidInputError,
    OutOfPagesError,
    RequestFailedError,
    RoundFailedError,
)
from tests.hybrids import RecallHead, greedy_text, tiny_hybrid
from tests.quantised import Int8Pair
from tests.specdec.test_hybrid_kv_cache import mixed
from tests.specdec.wrapped.test_long_rope import OPTIONS, answers_of, model_of, scripted

PROMPTS = random_prompts((5, 33, 1, 17))
GREEDY = SamplingParams(max_new_tokens=14, return_drafts=True)
PARAMS = [
    GREEDY,
    replace(GREEDY, temperature=0.8, seed=3),
    replace(GREEDY, temperature=1.2, top_k=9, top_p=0.9, seed=4),
    replace(GREEDY, num_speculative_tokens=2),
]
SIZES: dict[str, Any] = {"num_speculative_tokens": 3, "max_model_len": 128, "kv_cache_tokens": 400}


def lived(completions: list[Any]) -> list[Any]:
    return [(c.token_ids, c.text, c.drafts, c.stats.rounds, c.finish_reason) for c in completions]


def sent(handoffs: list[Handoff]) -> list[Handoff]:
    """As they come out of bytes."""
    return [Handoff.from_bytes(handoff.to_bytes()) for handoff in handoffs]


def moved(p: Any, d: Any, prompts: Any, params: Any) -> list[Any]:
    """Completions of requests that `p` read and `d` continued; both are free after it."""
    completions = d.resume(sent(p.prefill(prompts, params)))
    assert free_everywhere(p) and free_everywhere(d)
    return completions


def eagle3(**options: Any) -> Any:
    return wrap(tiny_llama(), table_head(tiny_llama(), known=range(0, 64, 2), aux_layers=(1, 2, 3)), **SIZES | options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "there"),
    [
        ({}, {"kv_cache_tokens": 232, "max_num_seqs": 2, "max_num_batched_tokens": 12}),
        ({"kv_cache_layout": "HND", "enable_prefix_caching": True}, {}),
        pytest.param({"num_speculative_tokens": 0}, {}, marks=pytest.mark.long),
        ({"kv_cache_dtype": "fp8", "kv_cache_scales": [(0.05, 0.03)] * 4, "draft_sampling": "greedy"}, {}),
        ({"sampling": "keyed"}, {}),
    ],
    ids=["other sizes", "HND, prefixes", "no drafts", "fp8", "keyed"],
)
@pytest.mark.cases(1)
def test_tokens_and_drafts_are_those_of_a_request_that_never_moved(
    options: dict[str, Any], there: dict[str, Any]
) -> None:
    """Greedy and sampled, other K, page numbers, rows and sizes; D has fewer rows than requests that hold pages."""
    params = (
        PARAMS if options.get("num_speculative_tokens", 3) else [replace(p, num_speculative_tokens=0) for p in PARAMS]
    )

    def load(**given: Any) -> Any:
        return eagle3(**given)

    stays, p, d = load(**options), load(**options), load(**options | there)
    expected = stays.generate(PROMPTS, params)
    completions = moved(p, d, PROMPTS, params)
    assert lived(completions) == lived(expected)
    if params is PARAMS and "fp8" not in str(options):
        greedy = [c for c, own in zip(completions, params, strict=True) if own.greedy]
        assert [wrong_rounds(stays.head, c) for c in greedy] == [[], []]
        accepted = [r.accepted for c in completions for r in c.stats.rounds]
        assert 0 in accepted and max(accepted) >= 2


def test_the_first_round_there_verifies() -> None:
    p, d = eagle3(), eagle3()
    (handoff,) = p.prefill(PROMPTS[1], GREEDY)
    assert p.usage().target_pages == 9 and p.usage().rows == 0 and p.usage().requests == 0
    assert len(handoff.tensors["drafts"]) == 3 and handoff.token_ids and handoff.prompt_token_ids == PROMPTS[1]
    before = d.engine_stats.rounds
    (completion,) = d.resume(handoff)
    assert d.engine_stats.rounds - before == len(completion.stats.rounds)
    assert completion.drafts[0] == tuple(handoff.tensors["drafts"].tolist())
    assert completion.stats.prefill_s > 0 and free_everywhere(p)


@pytest.mark.slow
def test_requests_that_come_join_rows_that_run() -> None:
    """Beside rows that decode, greedy and sampled; nobody's tokens or drafts depend on it."""
    p, d, stays = eagle3(), eagle3(max_num_seqs=4, max_num_batched_tokens=24), eagle3()
    expected = stays.generate(PROMPTS, PARAMS)
    running = d.stream(PROMPTS[:2], PARAMS[:2])
    updates = [next(running) for _ in range(5)]
    assert lived(moved_beside(p, d)) == lived(expected[2:])
    done = {u.index: u.completion for u in [*updates, *running] if u.completion}
    assert lived([done[0], done[1]]) == lived(expected[:2]) and free_everywhere(d)


def moved_beside(p: Any, d: Any) -> list[Any]:
    return d.resume(sent(p.prefill(PROMPTS[2:], PARAMS[2:])))


@pytest.mark.slow
def test_streams_report_the_first_token_too() -> None:
    p, d = eagle3(), eagle3()
    (expected,) = p.generate(PROMPTS[1], GREEDY)
    updates = list(d.stream_resumed(p.prefill(PROMPTS[1], GREEDY)[0]))
    assert [t for u in updates for t in u.token_ids] == expected.token_ids
    assert "".join(u.text for u in updates) == expected.text and len(updates) > 3


FURTHER = (("qwen3_next", pytest.mark.slow), ("mamba2", pytest.mark.long))
FURTHER += (("falcon_h1", pytest.mark.long), ("jamba", pytest.mark.long))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lfm2", *(pytest.param(n, marks=m) for n, m in FURTHER)])
@pytest.mark.thorough
def test_states_of_recurrent_layers_move(name: str) -> None:
    def load() -> Any:
        model = tiny_hybrid(name)
        return wrap(model, eagle3_head(model), **SIZES)

    p, d, stays = load(), load(), load()
    expected = lived(stays.generate(PROMPTS, PARAMS))
    d.generate(PROMPTS[::-1], GREEDY)  # slots that were used
    assert lived(moved(p, d, PROMPTS, PARAMS)) == expected
    handoffs = sent(p.prefill(PROMPTS, PARAMS))
    for handoff in handoffs:  # planted: states of nobody
        for key in handoff.tensors:
            if key.startswith("state"):
                handoff.tensors[key].zero_()
    assert lived(d.resume(handoffs)) != expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen3_next", pytest.param("lfm2", marks=pytest.mark.long), pytest.param("jamba", marks=pytest.mark.long)]
)
@pytest.mark.thorough
def test_states_move_between_engines_of_another_k(name: str) -> None:
    """Their rings differ; what moves does not: a state, and the last inputs of a convolution."""
    right = [greedy_text(name, prompt, 20) for prompt in PROMPTS]
    head = RecallHead(right, 0.6)
    p, d = (wrap(tiny_hybrid(name), head, **SIZES | {"num_speculative_tokens": k}) for k in (2, 5))
    d.generate(PROMPTS[::-1], GREEDY)  # slots that were used
    for a, b in ((p, d), (d, p)):
        completions = moved(a, b, PROMPTS, SamplingParams(20, num_speculative_tokens=2))
        assert [q + list(c.token_ids) for q, c in zip(PROMPTS, completions, strict=True)] == right
    (handoff,) = p.prefill(PROMPTS[1], SamplingParams(20))
    shapes = [list(handoff.tensors[f"state.{i}"].shape) for i in range(len(p.target.states.states))]
    assert shapes == [list(shape) for shape in d.target.states.moved_shapes]


def test_of_several_prompts_the_one_that_is_too_long_is_named() -> None:
    model = wrap(tiny_llama(), max_model_len=64)
    with pytest.raises(InvalidInputError, match=r"^prompt 1: the prompt has 64 tokens"):
        model.prefill([[1, 2], [3] * 64], GREEDY)
    assert free_everywhere(model)


def test_a_row_whose_states_lack_tokens_may_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """What moves is a state, without the inputs that would still have to go into it."""
    p, d = (wrap(model, eagle3_head(model), **SIZES) for model in (tiny_hybrid("qwen3_next") for _ in range(2)))
    with monkeypatch.context() as patched:  # the last token of a prompt waits in the ring as accepted drafts do
        patched.setattr(FoldRule, "num_new", lambda rule, replay, num_new, decodes: num_new - 1)
        with pytest.raises(RoundFailedError, match="leaves with 4 of its 5 tokens in its states"):
            p.prefill(PROMPTS[0], GREEDY)
    d.resume(sent(p.prefill(PROMPTS[0], GREEDY)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "group", "first"), [("gemma3_text", "window 20", (70 - 19) // 4), ("llama4_text", "chunks of 48", 48 // 4)]
)
@pytest.mark.thorough
def test_windowed_groups_move_what_their_windows_show(kind: str, group: str, first: int) -> None:
    """Or their chunks: of the request of 48 tokens nothing, its next token begins one."""
    prompts, params = random_prompts((5, 70, 1, 41, 48)), [*PARAMS, GREEDY]

    def load(**options: Any) -> Any:
        model = mixed(kind)
        return wrap(model, table_head(model), num_speculative_tokens=3, kv_cache_tokens=800, **options)

    p, d, stays, other = load(), load(), load(), load(hybrid_kv_cache=False)
    (handoff,) = p.prefill(prompts[1], GREEDY)
    near, far = (len(handoff.blocks[name]) for name in (f"target, {group}", "target"))
    assert (near, far) == (18 - first, 18)
    with pytest.raises(HandoffMismatchError, match="hybrid_kv_cache"):
        other.resume(handoff)
    p.release(handoff)
    if kind == "llama4_text":
        p.open_transfer("sockets"), d.open_transfer("sockets")
        (handoff,) = p.prefill(prompts[4], GREEDY)
        assert not handoff.blocks[f"target, {group}"]
        p.release(handoff)
    assert lived(moved(p, d, prompts, params)) == lived(stays.generate(prompts, params))


@pytest.mark.slow
def test_a_group_without_pages_is_read_over_sockets() -> None:
    """The head's, of a request that does not draft."""
    (p, d), asked = (eagle3(), eagle3()), replace(GREEDY, num_speculative_tokens=0)
    for model in (p, d):
        model.open_transfer("sockets")
    assert lived(moved(p, d, PROMPTS[:1], asked)) == lived(p.generate(PROMPTS[:1], asked))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::specdec.SpecdecWarning")
@pytest.mark.thorough
def test_quantised_targets_move_between_equal_weights() -> None:
    """Weights of two tensors, as torchao's: numbers and scales are part of the fingerprint."""

    def load(change: bool = False) -> Any:
        model = tiny_llama()
        for layer in model.model.layers:
            pair = Int8Pair.of(layer.mlp.down_proj.weight)
            if change:
                pair.numbers[0, 0] ^= 1
            layer.mlp.down_proj.weight = torch.nn.Parameter(pair, requires_grad=False)
        return wrap(model, eagle3_head(tiny_llama()), **SIZES)

    p, d, stays, other = load(), load(), load(), load(change=True)
    assert lived(moved(p, d, PROMPTS, PARAMS)) == lived(stays.generate(PROMPTS, PARAMS))
    (handoff,) = p.prefill(PROMPTS[0], GREEDY)
    with pytest.raises(HandoffMismatchError, match="target weights"):
        other.resume(handoff)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.long), "phi3"])
@pytest.mark.thorough
def test_longrope_requests_keep_their_factors(kind: str) -> None:
    """Prompts around the length at which factors change; a Phi-3 that is just there reads all again in D."""
    prompts, answers = answers_of(kind)

    def load() -> Any:
        return wrap(model_of(kind), scripted(kind), num_speculative_tokens=3, **(OPTIONS | {"kv_cache_tokens": 900}))

    p, d, stays = load(), load(), load()
    params = SamplingParams(max_new_tokens=24, return_drafts=True)
    completions = moved(p, d, prompts, params)
    assert [c.token_ids for c in completions] == answers
    assert lived(completions) == lived(stays.generate(prompts, params))


def test_a_request_that_ends_with_its_first_token_needs_no_other_engine() -> None:
    p, d = eagle3(), eagle3()
    one = replace(GREEDY, max_new_tokens=1)
    (first,) = p.generate(PROMPTS[0], one)
    stopped = replace(GREEDY, stop_token_ids=(first.token_ids[0],))
    handoffs = sent(p.prefill([PROMPTS[0]] * 2, [one, stopped]))
    assert [h.completion.finish_reason for h in handoffs] == ["length", "stop"] and free_everywhere(p)
    completions = d.resume(handoffs)
    assert [c.token_ids for c in completions] == [first.token_ids] * 2
    assert lived(completions[:1]) == lived([first]) and d.engine_stats.rounds == 0
    assert [u.completion.token_ids for u in d.stream_resumed(handoffs[0])] == [first.token_ids]


@pytest.mark.slow
def test_stop_strings_and_eos_there() -> None:
    p, d, stays = eagle3(), eagle3(), eagle3()
    (whole,) = stays.generate(PROMPTS[1], GREEDY)
    stop = whole.text[7:10]
    params = [replace(GREEDY, stop=(stop,)), replace(GREEDY, stop_token_ids=(whole.token_ids[9], EOS))]
    expected = stays.generate([PROMPTS[1]] * 2, params)
    assert {c.finish_reason for c in expected} == {"stop"}
    assert lived(moved(p, d, [PROMPTS[1]] * 2, params)) == lived(expected)


@pytest.mark.slow
@pytest.mark.thorough
def test_preempted_after_the_move() -> None:
    """D has pages for little more than the prompts: requests that came lose them, and read their tokens again."""
    p, d, stays = eagle3(), eagle3(kv_cache_tokens=88), eagle3()
    params = [replace(own, max_new_tokens=40) for own in PARAMS]
    expected = stays.generate(PROMPTS, params)
    completions = moved(p, d, PROMPTS, params)
    assert lived(completions) == lived(expected)
    assert sum(c.stats.preemptions for c in completions) > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_size": 8}, "page_size is 4 .* and 8"),
        ({"kv_cache_layout": "HND"}, "NHD pages there and HND"),
        ({"kv_cache_dtype": "fp8"}, "dtype is float32 .* and float8_e4m3fn"),
        ({"max_model_len": 40}, "max_model_len=40"),
        ({"num_speculative_tokens": 2}, "num_speculative_tokens=2"),
        ({"draft_sampling": "greedy"}, "draft_sampling: probabilistic"),
        ({"model": tiny_llama(seed=5)}, "target weights"),
        ({"head": eagle3_head(tiny_llama())}, "head"),
        ({"head": None, "num_speculative_tokens": 0}, "head"),
    ],
)
@pytest.mark.cases(1)
def test_another_engine_is_refused_before_anything_is_read(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, own = (
        eagle3(),
        {"model": tiny_llama(), "head": table_head(tiny_llama(), known=range(0, 64, 2), aux_layers=(1, 2, 3))},
    )
    own = SIZES | own | options
    d = wrap(own.pop("model"), own.pop("head"), **own)
    (handoff,) = p.prefill(PROMPTS[1], GREEDY)
    monkeypatch.delattr(attention.transport.transports.LocalTransport, "copy")
    with pytest.raises(HandoffMismatchError, match=words):
        d.resume(handoff)
    assert free_everywhere(d) and p.usage().target_pages == 9  # still held
    p.release(handoff)
    assert free_everywhere(p)


@pytest.mark.parametrize(
    "change",
    [
        {"drafts": torch.tensor([1, 64, 2])},
        {"drafts": torch.tensor([1, -1, 2])},
        {"drafts": torch.zeros(4, dtype=torch.int64)},
        {"drafts": torch.zeros(0, dtype=torch.int64)},
        {"drafts": torch.zeros(3)},
        {"draft_probs": torch.zeros(3, 31)},
        {"state.0": torch.zeros(3)},
        {"carried": torch.zeros(1, 32)},
    ],
)
def test_tensors_that_would_end_a_round_are_refused(change: dict[str, torch.Tensor]) -> None:
    """A round is shared: what somebody sends must not fail it for the others."""
    p, d = eagle3(), eagle3()
    (handoff,) = p.prefill(PROMPTS[1], PARAMS[1])
    with pytest.raises(HandoffMismatchError, match="it brings"):
        d.resume(replace(handoff, tensors={**handoff.tensors, **change}))
    with pytest.raises(TransferError, match="not of lease"):
        d.resume(replace(handoff, blocks={group: [999] * len(own) for group, own in handoff.blocks.items()}))
    p.release(handoff)
    assert free_everywhere(d) and free_everywhere(p)


@pytest.mark.slow
def test_other_scales_of_an_fp8_cache_are_refused() -> None:
    own: dict[str, Any] = {"kv_cache_dtype": "fp8"}
    p, d = eagle3(**own), eagle3(**own, kv_cache_scales=[(0.05, 0.03)] * 4)
    with pytest.raises(HandoffMismatchError, match="scales of an fp8 cache"):
        d.resume(p.prefill(PROMPTS[0], GREEDY))


@pytest.mark.slow
def test_weights_that_changed_in_place_are_refused() -> None:
    p, d = eagle3(), eagle3()
    assert moved(p, d, PROMPTS[:1], GREEDY)
    with torch.no_grad():
        d.hf_model.lm_head.weight[0, 0] += 1
    with pytest.raises(HandoffMismatchError, match="target weights"):
        d.resume(p.prefill(PROMPTS[0], GREEDY))


@pytest.mark.slow
def test_a_lease_ends_and_pages_are_free() -> None:
    p, d = eagle3(), eagle3()
    guests_of(p).held.grace = 0.05
    (handoff,) = p.prefill(PROMPTS[1], GREEDY, lease_seconds=0.05)
    assert p.usage().target_pages == 9
    time.sleep(0.11)
    assert free_everywhere(p)
    with pytest.raises(TransferError, match="lease"):
        d.resume(handoff)
    with pytest.raises(TransferError, match="no longer held"):  # even if its clock were wrong
        d.resume(replace(handoff, expires=time.time() + 9))
    assert free_everywhere(d)
    (again,) = d.resume(handoff, on_failure="prefill")
    assert lived([again]) == lived(eagle3().generate(PROMPTS[1], GREEDY)) and free_everywhere(d)


def test_a_lease_serves_once() -> None:
    p, d = eagle3(), eagle3()
    handoffs = p.prefill(PROMPTS[0], GREEDY)
    d.resume(handoffs)
    assert free_everywhere(p)
    with pytest.raises(TransferError, match="no longer held"):
        d.resume(handoffs)


@pytest.mark.slow
def test_held_pages_survive_an_interrupt_and_a_failed_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tables are made anew then; pages that another engine may be reading are not among the free ones."""
    p, d, stays = eagle3(enable_prefix_caching=True), eagle3(), eagle3()
    (handoff,) = p.prefill(PROMPTS[1], GREEDY)
    engine = engine_of(p)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.executor.reads, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            p.generate(PROMPTS[0], GREEDY)
    p.generate(PROMPTS, GREEDY)  # writes to all other pages
    assert p.usage().target_pages == 9
    scheduler_of(p).target_pages.validate()
    assert lived(d.resume(handoff)) == lived(stays.generate(PROMPTS[1], GREEDY))
    assert free_everywhere(p)


def test_a_request_that_cannot_be_reported_is_not_held() -> None:
    class Tokenizer(LetterTokenizer):
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
            raise RuntimeError("no text")

    p = wrap(tiny_llama(), table_head(tiny_llama()), **SIZES, tokenizer=Tokenizer())
    with pytest.raises(RequestFailedError):
        p.prefill(PROMPTS[0], GREEDY)
    assert free_everywhere(p)


def test_prompts_that_are_not_held_at_once_are_refused() -> None:
    p = eagle3(kv_cache_tokens=88)
    with pytest.raises(CacheTooSmallError, match="fewer at a time"):
        p.prefill(PROMPTS * 2, GREEDY)
    long = replace(GREEDY, max_new_tokens=90)  # more than its cache holds: the other engine's business
    assert p.prefill(PROMPTS[1], long)[0].moved.limit == 123


@pytest.mark.slow
def test_pages_there_are_waited_for() -> None:
    """D is full: its own requests go on until the one that comes finds pages."""
    p, d, stays = eagle3(), eagle3(kv_cache_tokens=88), eagle3()
    own = d.stream(random_prompts((60,))[0], GREEDY)
    next(own)
    assert lived(d.resume(p.prefill(PROMPTS[1], GREEDY))) == lived(stays.generate(PROMPTS[1], GREEDY))
    assert [u.completion for u in own][-1] is not None
    (handoff,) = p.prefill(PROMPTS[1], GREEDY)
    held = [guests_of(d).reserve(handoff.moved) for _ in range(2)]
    with pytest.raises(OutOfPagesError, match="9 pages wanted, 4 are free"):
        d.resume(handoff, timeout=0.05)
    for number in held:
        guests_of(d).drop(number, lambda: True)
    assert free_everywhere(d)


class Slow:
    """A transport whose reads are late, and may still write."""

    def __init__(self, plain: Any) -> None:
        self.plain, self.settled = plain, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def read(self, plan: Any) -> Any:
        return self

    def wait(self, deadline: float) -> None:
        raise TransferTimeoutError("late")


def test_pages_of_a_late_read_are_in_quarantine_until_nothing_writes_to_them() -> None:
    p, d = eagle3(), eagle3(kv_cache_tokens=88)
    slow = Slow(attention.transport.transports.LocalTransport())
    d.open_transfer(slow)
    (handoff,) = p.prefill(PROMPTS[1], GREEDY)
    with pytest.raises(TransferTimeoutError, match="late"):
        d.resume(handoff)
    late = late_pages(d)
    assert d.usage().target_pages == 9 and late
    for prompt in (PROMPTS[0], PROMPTS[3]):
        with closing(d.stream(prompt, GREEDY)) as stream:
            next(stream)
            used = set(scheduler_of(d).target_pages.table.flatten().tolist())
            assert not used & late, "a page was used again while a read may write to it"
    slow.settled = True
    assert free_everywhere(d)


@pytest.mark.slow
def test_closed_iterators_and_models_hold_nothing() -> None:
    p, d = eagle3(), eagle3()
    stream = d.stream_resumed(p.prefill(PROMPTS[1], GREEDY)[0])
    next(stream)
    stream.close()
    assert free_everywhere(d) and free_everywhere(p)
    (handoff,) = p.prefill(PROMPTS[1], GREEDY)
    p.close()
    with pytest.raises(TransferError, match="not open in this process"):
        d.resume(handoff)
    assert free_everywhere(d)


@pytest.mark.parametrize("data", [b"", b"specdec handoff\n", b"x" * 99, b"specdec handoff\n\x05" + bytes(7) + b"[1,2]"])
def test_bytes_that_are_no_handoff(data: bytes) -> None:
    with pytest.raises(HandoffMismatchError, match="no handoff"):
        Handoff.from_bytes(data)


def test_bytes_of_another_version_and_cut_off_ones() -> None:
    (handoff,) = eagle3().prefill(PROMPTS[0], PARAMS[1])
    data = handoff.to_bytes()
    with pytest.raises(HandoffMismatchError, match="version 9"):
        Handoff.from_bytes(data.replace(f'"version": {VERSION}'.encode(), b'"version": 9', 1))
    with pytest.raises(HandoffMismatchError, match="no handoff"):
        Handoff.from_bytes(data[:-1])
    assert b"pickle" not in data and Handoff.from_bytes(data).moved == handoff.moved


def test_models_that_are_divided_among_ranks_need_a_transport_between_processes() -> None:
    p = eagle3()
    p.ranks = SimpleNamespace(size=2)
    own = attention.transport.transports.LocalTransport()
    for call in (p.open_transfer, lambda: p.open_transfer(own), lambda: p.prefill(PROMPTS[0], GREEDY)):
        with pytest.raises(InvalidInputError, match="divided among 2 ranks"):
            call()
    p.ranks = None


def test_refusals_of_bad_arguments() -> None:
    p = eagle3()
    with pytest.raises(InvalidInputError, match="allowed are local, sockets, nixl"):
        p.open_transfer("pigeon")
    with pytest.raises(InvalidInputError, match="lease_seconds"):
        p.prefill(PROMPTS[0], lease_seconds=0)
    with pytest.raises(InvalidInputError, match="on_failure"):
        p.resume(p.prefill(PROMPTS[0]), on_failure="hope")  # type: ignore[arg-type]
    with pytest.raises(TransferError, match=r"still held for another model; call .* or release\(handoff\)"):
        p.open_transfer("sockets")
    for bad in (None, "x", b"zz", [{}], 3):
        for call in (p.resume, p.release):
            with pytest.raises(InvalidInputError, match="allowed is a Handoff or a list of them"):
                call(bad)  # type: ignore[operator]
    (handoff,) = p.prefill(PROMPTS[0])
    for time_ in (float("nan"), "3", None, 0, True):
        with pytest.raises(InvalidInputError, match=r"timeout=.*a number of seconds above 0"):
            p.resume(handoff, timeout=time_)  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match=r"lease_seconds=.*a number of seconds above 0"):
            p.prefill(PROMPTS[0], lease_seconds=time_)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "options", "words"),
    [
        ("sockets", {"prot": 1}, "prot: no option of transport 'sockets'; allowed are: host, port"),
        ("sockets", {"port": 99999}, "port=99999: allowed is a whole number"),
        ("sockets", {"port": "80"}, "port='80': allowed"),
        ("sockets", {"host": 3}, "host=3: allowed"),
        ("local", {"port": 3}, "port: no option of transport 'local'; allowed are: none"),
        ("nixl", {"backends": "UCX"}, "backends='UCX': allowed is a list"),
        (None, {}, "transport=None: allowed are local, sockets, nixl, and objects"),
        (attention.transport.transports.LocalTransport(), {"port": 3}, "port: options belong to a transport's name"),
    ],
)
@pytest.mark.cases(1)
def test_a_transport_with_bad_options_is_refused_and_the_open_one_stays(
    transport: Any, options: dict[str, Any], words: str
) -> None:
    p, d = eagle3(), eagle3()
    for model in (p, d):
        model.open_transfer("sockets")
    handoffs = p.prefill(PROMPTS[0], GREEDY)
    p.release(p.prefill(PROMPTS[1], GREEDY))
    with pytest.raises(InvalidInputError, match=words):
        d.open_transfer(transport, **options)
    assert lived(d.resume(handoffs)) == lived(p.generate(PROMPTS[0], GREEDY))


def test_what_cannot_be_opened_is_not_replaced_by_another_transport() -> None:
    p, other = eagle3(), eagle3()
    port = other.open_transfer("sockets").ranks[0].address["port"]
    for _ in range(2):
        with pytest.raises(TransferError, match="cannot listen"):
            p.open_transfer("sockets", port=port)
        with pytest.raises(TransferError, match=r"no transport is open.*cannot listen"):
            p.prefill(PROMPTS[0], GREEDY)
    p.open_transfer("local")
    assert p.prefill(PROMPTS[0], GREEDY)[0].source.transport == "local"


@pytest.mark.slow
@pytest.mark.parametrize("planted", [False, True])
def test_rounds_in_vain_do_not_write_to_pages_that_were_filled(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that a stop string has ended is in the launched round; its pages are free, and are given to who comes.

    On a CPU that round has run when it was launched, so it is seen that pages are filled only once it is over.
    """
    p, d = eagle3(), eagle3(max_num_seqs=4, max_num_batched_tokens=40)
    launch_ahead(d)
    if planted:
        monkeypatch.setattr(guests_of(d), "may_fill", lambda number: True)
    (text,) = (c.text for c in p.generate(PROMPTS[3], GREEDY))
    stays = d.stream(PROMPTS[0], replace(GREEDY, max_new_tokens=90))
    ends = d.stream(PROMPTS[3], replace(GREEDY, stop=(text[5:8],)))
    next(stays)
    while next(ends).completion is None:
        pass
    (handoff,) = p.prefill(PROMPTS[1], GREEDY)
    kept = [bytes_of(p, handoff.blocks[group]) for group in ("target",)]
    given: list[Any] = []
    held, rounds = guests_of(d).held, [d.engine_stats.rounds]
    take, pages_of = held.take, held.pages_of
    monkeypatch.setattr(held, "take", lambda number: given.append(take(number)) or given[-1])
    monkeypatch.setattr(held, "pages_of", lambda number: rounds.append(d.engine_stats.rounds) or pages_of(number))
    resumed = d.stream_resumed(handoff)
    next(resumed)
    assert (rounds[1] > rounds[0]) != planted
    assert bytes_of(d, given[0][0]) == kept[0]
    resumed.close()
    stays.close()
    assert free_everywhere(d)


def bytes_of(wrapped: Any, pages: Any) -> list[Any]:
    """The keys of the target's first layer in full pages."""
    return wrapped.runners[0].layers[0].keys[list(pages)[:-1]].tolist()


@pytest.mark.slow
@pytest.mark.thorough
def test_threads_share_both_engines() -> None:
    p, d, stays = eagle3(enable_prefix_caching=True), eagle3(enable_prefix_caching=True), eagle3()
    prompts = random_prompts((9, 21, 13, 30, 9, 17), seed=2)
    params = [replace(PARAMS[i % 3], seed=i) for i in range(6)]
    expected = lived(stays.generate(prompts, params))

    def move(i: int) -> Any:
        return lived(d.resume(sent(p.prefill(prompts[i], params[i]))))[0]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(move, range(6))) == expected
    assert free_everywhere(p) and free_everywhere(d)
    again = random_prompts((2,))[0]  # pages that came are found by later requests of D
    before = d.engine_stats.prefix_hit_tokens
    d.generate(prompts[3] + again, GREEDY)
    assert d.engine_stats.prefix_hit_tokens - before >= 28
