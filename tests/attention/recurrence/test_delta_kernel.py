"""The gated delta rule's kernels in Triton's interpreter against the rule token by token in float64."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl

from attention.errors import InvariantError
from attention.recurrence import delta_kernel, tokens_kernel
from attention.recurrence.delta_kernel import ShortTiling, gated_delta, unit_upper_inverse
from attention.recurrence.kernel_rows import StateTiling
from attention.recurrence.states import DeltaRing
from tests.attention.recurrence import token_by_token as oracle
from tests.attention.recurrence.recurrence_cases import (
    LONG,
    LONG_RING,
    RING,
    ROUND,
    TOKENS,
    apart,
    checked,
    close,
    delta_case,
    same_rings,
)
from tests.attention.recurrence.token_by_token import StateRows


def ring_places(start: int, replay: int, num_new: int, drafts: int, size: int) -> tuple[set[int], set[int]]:
    """The places of a row's ring that a launch reads and those it writes.

    They never meet where the tokens replayed and those of the launch are at most `size` (`FoldRule.ring_size`), or
    replay is 0:

    >>> ring_places(start=20, replay=2, num_new=1, drafts=3, size=7)
    ({4, 5}, {0, 1, 2})
    """
    first_draft = start + num_new
    reads = {p % size for p in range(start - replay, start)}
    return reads, {p % size for p in range(first_draft, first_draft + drafts)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "dims", "vector", "tiling"),
    [
        ((1, 2), (16, 16), False, StateTiling(8, 8, 1)),
        ((2, 2), (16, 8), True, StateTiling(4, 16, 1)),
        ((2, 2), (24, 12), False, None),  # no powers of two, as OLMo hybrid's heads
    ],
)
@pytest.mark.cases(1)
def test_a_round(
    heads: tuple[int, int],
    dims: tuple[int, int],
    vector: bool,
    tiling: StateTiling | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    if tiling is not None:
        monkeypatch.setattr(tokens_kernel, "state_tiling", lambda *_: tiling)
    case = delta_case(TOKENS, heads, dims, vector)
    checked(gated_delta, oracle.gated_delta, case | {"l2_normalize": not vector}, StateRows.of(ROUND), 1e-6, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "block_dv", "grouped"),
    [((16, 40), 16, False), ((24, 12), 16, True), pytest.param((32, 32), 32, True, marks=pytest.mark.long)],
)
@pytest.mark.thorough
def test_a_round_of_the_token_kernel_and_of_other_tilings(
    dims: tuple[int, int], block_dv: int, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    case, rows = delta_case(TOKENS, (1, 2), dims, False), StateRows.of(ROUND)
    monkeypatch.setattr(delta_kernel, "short_tiling", lambda *_: ShortTiling(block_dv, 16, (2, 1), 4))
    monkeypatch.setattr(delta_kernel, "_GROUPED_UNITS", 1 if grouped else 99)
    checked(gated_delta, oracle.gated_delta, case, rows, 1e-6, 1e-6)
    monkeypatch.setattr(delta_kernel, "ONE_CHUNK", False)
    checked(gated_delta, oracle.gated_delta, case, rows, 1e-6, 1e-6)


@pytest.mark.parametrize("vector", [False, True])
def test_in_order_one_kernel_serves_every_row(vector: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [(9, 1, 12, 7, 1), (20, 4, 0, 0, 18), (3, 5, 5, 2, 1)]
    torch.manual_seed(3)
    case = delta_case(34, (1, 1), (16, 16), vector, ring_size=21) | {"in_order": True}
    right = partial(_unordered, oracle.gated_delta)
    for name in ("launch_delta_short", "launch_chunks"):
        monkeypatch.delattr(delta_kernel, name)
    tilings = []
    own = tokens_kernel.state_tiling
    monkeypatch.setattr(tokens_kernel, "state_tiling", lambda *given: tilings.append(given[0]) or own(*given))
    checked(gated_delta, right, case, StateRows.of(lengths), 1e-6, 1e-6)
    assert tilings == [0]  # whatever the number of rows


def _unordered(rule: Any, in_order: bool, **given: Any) -> torch.Tensor:
    return rule(**given)  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("vector", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.thorough
def test_which_kernel_serves_which_rows(vector: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tokens of a row, with and without the replayed ones; every row by one kernel, and as the rule says."""
    lengths = [(9, 1, 12, 7, 1), (10, 2, 12, 7, 1), (16, 3, 4, 0, 16), (17, 4, 0, 0, 17), (3, 5, 5, 2, 1)]
    torch.manual_seed(3)
    case = delta_case(sum(row[0] for row in lengths) + 2, (1, 1), (16, 16), vector, ring_size=21)
    checked(gated_delta, oracle.gated_delta, case, StateRows.of(lengths), 1e-5, 1e-5)
    served = {}
    for name in ("launch_delta_short", "launch_tokens", "launch_chunks"):
        alone = apart(case)
        with monkeypatch.context() as patch:
            for other in {"launch_delta_short", "launch_tokens", "launch_chunks"} - {name}:
                patch.setattr(delta_kernel, other, lambda *_, **__: None)
            gated_delta(**alone, rows=StateRows.of(lengths))
        served[name] = {slot for slot in range(1, 6) if not torch.equal(alone["state"][slot], case["state"][slot])}
    short, tokens = (set(), {1, 2, 3, 5}) if vector else ({1, 3, 5}, {2})
    assert served == {"launch_delta_short": short, "launch_tokens": tokens, "launch_chunks": {4}}


def test_gates_of_one_chunk_beyond_the_range_of_exp() -> None:
    """A token that forgets all, then some that forget little: the decay between these is as accurate as it was."""
    torch.manual_seed(4)
    lengths = [(14, 1, 9, 2, 1), (16, 2, 5, 0, 16)]
    case = delta_case(30, (1, 2), (16, 16), False, ring_size=29)
    case["g"] *= 1e-2
    case["g"][[3, 20]], case["g"][25] = -200.0, 0.0
    checked(gated_delta, oracle.gated_delta, case, StateRows.of(lengths), 1e-6, 1e-6)


@triton.jit
def _inverse_kernel(x_ptr, out_ptr, count):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + at, unit_upper_inverse(tl.load(x_ptr + at), count))


@pytest.mark.parametrize("kind", ["random", "equal keys"])
@pytest.mark.parametrize("count", [4, 5, 8, 9, 16])
def test_inverse_of_one_chunk(kind: str, count: int) -> None:
    """Of equal keys without decay the powers of A grow to thousands, its inverse has but 1 and -1."""
    torch.manual_seed(0)
    A = (torch.randn(16, 16) * 0.5 if kind == "random" else torch.ones(16, 16)).triu(1)
    A[:, count:] = 0.0
    out = torch.empty_like(A)
    _inverse_kernel[(1,)](A, out, count)
    close(out, (torch.eye(16) + A).double().inverse(), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "rounds"),
    [
        (torch.float32, 50),
        *(pytest.param(dtype, 200, marks=pytest.mark.long) for dtype in (torch.float32, torch.float16)),
    ],
)
@pytest.mark.thorough
def test_many_rounds(dtype: torch.dtype, rounds: int) -> None:
    """Many rounds of gates near 0, keys that repeat, accepted drafts replayed and others rejected: the state stays
    within float32 of the rule's in float64, and every output with it."""
    torch.manual_seed(5)
    drafts, size, names = 3, 7, ("q", "k", "v", "g", "beta")
    ours = delta_case(4, (1, 1), (16, 16), False, dtype, slots=2, ring_size=size)
    right = apart(ours)
    right["state"] = right["state"].double()
    start, replay = 9, 0
    for turn in range(rounds):
        tokens = delta_case(1 + drafts, (1, 1), (16, 16), False, dtype, slots=2, ring_size=size)
        tokens["g"] *= 1e-3
        if turn % 3 == 0:
            tokens["k"][1:] = tokens["k"][:1]
        new, rows = {n: tokens[n] for n in names}, StateRows.of([(1 + drafts, 1, start, replay, 1)])
        close(gated_delta(**ours | new, rows=rows), oracle.gated_delta(**right | new, rows=rows), 1e-3)
        replay = int(torch.randint(0, drafts + 1, ()))
        start += 1 + replay
    close(ours["state"][1], right["state"][1], 3e-6)
    same_rings(ours["ring"], right["ring"])


@pytest.mark.slow
@pytest.mark.thorough
def test_half_precision() -> None:
    torch.manual_seed(1)
    case = delta_case(TOKENS, (2, 4), (16, 8), False, torch.float16)
    checked(gated_delta, oracle.gated_delta, case, StateRows.of(ROUND), 1e-3, 1e-6)


EVERY_KERNEL = [
    *((2, 1, 9, 2, 1), (1, 4, 2, 2, 1), (2, 6, 9, 3, 0)),  # as one chunk: of the second nothing is stored before
    *((15, 2, 7, 2, 1), (16, 7, 5, 2, 1)),  # token by token: an input more than a chunk has; the longest
    (17, 3, 5, 1, 16),  # in chunks of 64
]
"""Rows at the limits between the kernels, see `attention.recurrence.delta_kernel`."""


def test_value_heads_take_neighbouring_key_heads() -> None:
    """Four value heads of two key heads, by each of the kernels; replayed keys are those of their head."""
    torch.manual_seed(0)
    case, rows = (
        delta_case(23, (2, 4), (8, 8), False, ring_size=29),
        [(2, 1, 9, 2, 1), (3, 2, 17, 14, 1), EVERY_KERNEL[-1]],
    )
    checked(gated_delta, oracle.gated_delta, case, StateRows.of(rows), 1e-5, 1e-5)


def test_keys_of_zeros_change_nothing() -> None:
    """They have no length to be divided by."""
    torch.manual_seed(0)
    case = delta_case(55, (1, 1), (8, 8), False, ring_size=21)
    case["k"][[1, 9, 25, 40]] = case["q"][[1, 9, 25, 40]] = 0.0
    checked(gated_delta, oracle.gated_delta, case, StateRows.of(EVERY_KERNEL), 1e-5, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("one_chunk", [False, True])
@pytest.mark.cases(1)
def test_rounds_follow_each_other(one_chunk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence in rounds with drafts, of which some are accepted, has the outputs and the state of one long launch:
    to the bit where tokens are read one after the other, within float32 where a round is one chunk."""
    monkeypatch.setattr(delta_kernel, "TOKENS_OF_SHORT_ROWS", 99)
    monkeypatch.setattr(delta_kernel, "ONE_CHUNK", one_chunk)

    def same(got: torch.Tensor, right: torch.Tensor) -> None:
        assert torch.equal(got, right) if not one_chunk else close(got, right) is None

    torch.manual_seed(2)
    accepted, drafts = [0, 2, 1, 2, 0, 1, 2, 1], RING // 2
    true = delta_case(3 + sum(accepted) + len(accepted), (1, 1), (16, 8), False, slots=2)
    total, names = len(true["v"]), ("q", "k", "v", "g", "beta")

    def launch(tensors: dict[str, Any], row: tuple[int, int, int, int, int]) -> torch.Tensor:
        return gated_delta(**true | {n: tensors[n] for n in names}, rows=StateRows.of([row]))

    whole = launch(true, (total, 1, 0, 0, total))
    final = true["state"][1].clone()
    outs = [launch({n: true[n][:3] for n in names}, (3, 1, 0, 0, 3))]
    start, replay = 3, 0
    for count in accepted:
        wrong = drafts - count  # rejected drafts, and what lies beyond the end
        tokens = {n: torch.cat([true[n][start : start + 1 + count], true[n][:wrong] * 0.7]) for n in names}
        outs.append(launch(tokens, (1 + drafts, 1, start, replay, 1))[: count + 1])
        start, replay = start + 1 + count, count
    same(torch.cat(outs), whole)
    launch({n: torch.zeros_like(true[n][:1]) for n in names}, (1, 1, start, replay, 1))  # folds the last drafts
    same(true["state"][1], final)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "dims", "vector", "dtype"),
    [
        ((1, 2), (16, 40), False, torch.float32),
        pytest.param((2, 2), (24, 16), True, torch.float32, marks=pytest.mark.slow),
        ((1, 1), (32, 16), False, torch.float16),
    ],
    ids=["scalar gate", "vector gate", "half"],
)
@pytest.mark.cases(1)
def test_long_rows_and_short(heads: tuple[int, int], dims: tuple[int, int], vector: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = delta_case(sum(row[0] for row in LONG) + 2, heads, dims, vector, dtype, ring_size=LONG_RING)
    case["g"] *= 5  # gates whose sums over a chunk are beyond the range of exp in float32
    limit = 1e-5 if dtype == torch.float32 else 1e-3
    checked(gated_delta, oracle.gated_delta, case, StateRows.of(LONG), limit, 1e-5)


def test_a_ring_that_would_round_is_noticed() -> None:
    case = delta_case(3, (1, 1), (8, 8), False)
    ring = DeltaRing(**vars(case["ring"]) | {"k": case["ring"].k.half()})
    with pytest.raises(InvariantError, match=r"k is torch.float32, the ring that keeps it torch.float16"):
        gated_delta(**case | {"ring": ring}, rows=StateRows.of([(3, 1, 0, 0, 3)]))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_ring_places_never_meet(data: st.DataObject) -> None:
    """Programs of a row read the ring while others of it write."""
    limit = data.draw(st.integers(0, 12), "K")
    replay = data.draw(st.integers(0, limit), "replay")
    num_new = data.draw(st.integers(1, 40), "num_new") if replay == 0 else 1
    drafts, start = data.draw(st.integers(0, limit), "drafts"), replay + data.draw(st.integers(0, 99), "folded")
    reads, writes = ring_places(start, replay, num_new, drafts, 2 * limit + 1)
    assert not reads & writes and len(reads) == replay and len(writes) == drafts


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_the_kernel_touches_only_these_places(data: st.DataObject) -> None:
    """It reads and writes what `ring_places` says, and nothing else of the ring."""
    drafts = data.draw(st.integers(0, 2), "drafts")
    replay, folded = data.draw(st.integers(0, 2), "replay"), data.draw(st.integers(1, 9), "folded")
    torch.manual_seed(replay)
    case, row = delta_case(1 + drafts, (1, 1), (8, 8), False, slots=2), (1 + drafts, 1, folded + replay, replay, 1)
    reads, writes = ring_places(folded + replay, replay, 1, drafts, RING)
    empty = DeltaRing(*(torch.full_like(x, torch.nan) for x in vars(case["ring"]).values()))
    for name, x in vars(empty).items():
        x[:, sorted(reads)] = getattr(case["ring"], name)[:, sorted(reads)]
    out = gated_delta(**case | {"ring": empty}, rows=StateRows.of([row]))
    assert torch.isfinite(out).all()
    for x in vars(empty).values():
        known = torch.isfinite(x[1].flatten(1)).all(1)
        assert {p for p in range(RING) if known[p]} == reads | writes


@pytest.mark.parametrize("rows", [ROUND, pytest.param(LONG, marks=pytest.mark.slow)], ids=["round", "long"])
@pytest.mark.parametrize("vector", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_states_in_half_precision_are_rounded_where_they_are_stored_and_nowhere_else(
    rows: list[tuple[int, ...]], vector: bool
) -> None:
    torch.manual_seed(0)
    tokens, ring = (TOKENS, RING) if rows is ROUND else (sum(row[0] for row in rows) + 2, LONG_RING)
    case = delta_case(tokens, (1, 2), (16, 40), vector, ring_size=ring)
    case["state"] = case["state"].half()  # the interpreter cuts bfloat16 off, a GPU rounds it
    checked(gated_delta, oracle.gated_delta, case, StateRows.of(rows), 1e-5, 1e-3)
