"""The gated delta rule's kernels in Triton's interpreter against the rule token by token in float64."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU is here: tests/gpu runs the kernels compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from attention.cache.state import DeltaRing
from attention.errors import InvariantError
from attention.kernels import delta_tokens
from attention.kernels.delta import gated_delta
from attention.kernels.delta_tokens import DeltaTiling
from attention.kernels.recurrent import ring_places
from tests.attention.kernels import token_by_token as oracle
from tests.attention.kernels.recurrence_cases import LONG, LONG_RING, RING, ROUND, TOKENS, checked, delta_case
from tests.attention.kernels.token_by_token import StateRows


@pytest.mark.parametrize(
    ("heads", "dims", "vector", "tiling"),
    [
        ((1, 2), (16, 16), False, DeltaTiling(8, 8, 1)),
        ((2, 2), (16, 8), True, DeltaTiling(4, 16, 1)),
        ((2, 2), (24, 12), False, None),  # no powers of two, as OLMo hybrid's heads
    ],
)
def test_a_round(
    heads: tuple[int, int],
    dims: tuple[int, int],
    vector: bool,
    tiling: DeltaTiling | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    if tiling is not None:
        monkeypatch.setattr(delta_tokens, "delta_tiling", lambda *_: tiling)
    case = delta_case(TOKENS, heads, dims, vector)
    checked(gated_delta, oracle.gated_delta, case | {"l2_normalize": not vector}, StateRows.of(ROUND), 1e-6, 1e-6)


def test_half_precision_and_a_ring_of_fewer_heads() -> None:
    """Keys repeated before the call, each kept once."""
    torch.manual_seed(1)
    case = delta_case(TOKENS, (2, 4), (16, 8), False, torch.float16)
    case |= {n: case[n].repeat_interleave(2, 1) for n in "qk"}
    checked(gated_delta, oracle.gated_delta, case, StateRows.of(ROUND), 1e-3, 1e-6)


def test_rounds_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence in rounds with drafts, of which some are accepted, has the outputs and the state of one long launch,
    to the bit: that holds for tokens read one after the other."""
    monkeypatch.setattr("attention.kernels.delta.TOKENS_OF_SHORT_ROWS", 99)
    torch.manual_seed(2)
    accepted, drafts = [0, 2, 1, 2, 0, 1], RING // 2
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
    assert torch.equal(torch.cat(outs), whole)
    launch({n: torch.zeros_like(true[n][:1]) for n in names}, (1, 1, start, replay, 1))  # folds the last drafts
    assert torch.equal(true["state"][1], final)


@pytest.mark.parametrize(
    ("heads", "dims", "vector", "dtype"),
    [
        ((1, 2), (16, 40), False, torch.float32),
        pytest.param((2, 2), (24, 16), True, torch.float32, marks=pytest.mark.slow),
        ((1, 1), (32, 16), False, torch.float16),
    ],
    ids=["scalar gate", "vector gate", "half"],
)
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
