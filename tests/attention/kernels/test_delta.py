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

from attention.kernels.delta import DeltaTiling, launch_delta
from attention.kernels.recurrent import ring_places
from tests.attention.kernels import token_by_token as oracle
from tests.attention.kernels.token_by_token import DeltaRing, StateRows, copied

K = 2
RING = 2 * K + 1


def inputs(
    tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    vector: bool,
    slots: int,
    dtype: torch.dtype,
    ring_heads: int | None = None,
    ring_size: int = RING,
) -> dict[str, Any]:
    """q and k are slices of a wider tensor, and state and rings full of values, as of requests before."""
    (key_heads, value_heads), (dim_k, dim_v) = heads, dims
    wide = torch.randn(tokens, 2 * key_heads * dim_k + value_heads * dim_v + 3).to(dtype)
    q, k, v, _ = wide.split([key_heads * dim_k, key_heads * dim_k, value_heads * dim_v, 3], 1)
    gates = (value_heads, dim_k) if vector else (value_heads,)
    ring = DeltaRing(
        torch.randn(slots, ring_size, ring_heads or key_heads, dim_k).to(dtype),
        torch.randn(slots, ring_size, value_heads, dim_v).to(dtype),
        -torch.rand(slots, ring_size, *gates),
        torch.rand(slots, ring_size, value_heads),
    )
    return {
        "q": q.unflatten(1, (key_heads, dim_k)),
        "k": k.unflatten(1, (key_heads, dim_k)),
        "v": v.unflatten(1, (value_heads, dim_v)),
        "g": -torch.rand(tokens, *gates),
        "beta": torch.rand(tokens, value_heads).to(dtype),
        "state": torch.randn(slots, value_heads, dim_v, dim_k),
        "ring": ring,
    }


def close(got: torch.Tensor, right: torch.Tensor, limit: float = 1e-6) -> None:
    """Relative Frobenius norm."""
    assert torch.isfinite(got).all()
    assert (got.double() - right.double()).norm() <= limit * right.double().norm()


def same_rings(got: Any, right: Any) -> None:
    for name in vars(right):
        assert torch.equal(getattr(got, name), getattr(right, name)), name


ROUND = [(3, 1, 7, 2, 1), (1, 4, 2, 2, 1), (2, 3, 5, 0, 1), (3, 2, 0, 0, 3), (3, 0, 0, 0, 1), (0, 5, 3, 1, 0)]
"""(tokens, slot, start, replay, num_new): replay and drafts, a single token that only replays, no replay, a prompt, a
padding row of a graph, a row of no tokens; then two tokens of no
row."""


def checked(case: dict[str, Any], rows: StateRows, normalize: bool, tiling: DeltaTiling | None) -> None:
    right = {**case, "state": case["state"].clone(), "ring": copied(case["ring"])}
    ours = {**case, "state": case["state"].clone(), "ring": copied(case["ring"])}
    expected = oracle.gated_delta(**right, scale=0.3, l2_normalize=normalize, rows=rows)
    out = torch.full(case["v"].shape, torch.nan, dtype=case["v"].dtype)
    launch_delta(**ours, scale=0.3, l2_normalize=normalize, rows=rows, out=out, most_tokens=16, tiling=tiling)
    close(out, expected, 1e-6 if out.dtype == torch.float32 else 1e-3)
    close(ours["state"][1:], right["state"][1:])
    same_rings(ours["ring"], right["ring"])


@pytest.mark.parametrize(
    ("heads", "dims", "vector", "normalize", "tiling"),
    [
        ((1, 2), (16, 16), False, True, DeltaTiling(8, 8, 1)),
        ((2, 2), (16, 8), True, False, DeltaTiling(4, 16, 1)),
        ((2, 2), (24, 12), False, True, None),  # no powers of two, as OLMo hybrid's heads
    ],
)
def test_a_round(
    heads: tuple[int, int], dims: tuple[int, int], vector: bool, normalize: bool, tiling: DeltaTiling | None
) -> None:
    torch.manual_seed(0)
    checked(inputs(14, heads, dims, vector, 6, torch.float32), StateRows.of(ROUND), normalize, tiling)


def test_half_precision_and_a_ring_of_fewer_heads() -> None:
    """Keys repeated before the call, each kept once."""
    torch.manual_seed(1)
    case = inputs(12, (2, 4), (16, 8), False, 6, torch.float16)
    case["q"], case["k"] = (case[n].repeat_interleave(2, 1) for n in "qk")
    checked(case, StateRows.of(ROUND), True, DeltaTiling(4, 8, 1))


def test_rounds_follow_each_other() -> None:
    """A sequence in rounds with drafts, of which some are accepted, has the outputs and the state of one long launch,
    to the bit: that holds for tokens read one after the other."""
    torch.manual_seed(2)
    accepted, dims = [0, 2, 1, 2, 0, 1], (16, 8)
    true = inputs(3 + sum(accepted) + len(accepted), (1, 1), dims, False, 2, torch.float32)
    total = len(true["v"])
    names = ("q", "k", "v", "g", "beta")

    def launch(tensors: dict[str, Any], row: tuple[int, int, int, int, int]) -> torch.Tensor:
        out = torch.zeros(row[0], 1, dims[1])
        given = {n: tensors[n] for n in names} | {"state": true["state"], "ring": true["ring"]}
        rows = StateRows.of([row])
        launch_delta(**given, scale=0.3, l2_normalize=True, rows=rows, out=out, most_tokens=99)
        return out

    whole = launch(true, (total, 1, 0, 0, total))
    final = true["state"][1].clone()
    outs = [launch({n: true[n][:3] for n in names}, (3, 1, 0, 0, 3))]
    start, replay = 3, 0
    for count in accepted:
        tokens = {n: true[n][start : start + 1 + K].clone() for n in names}
        for n in names:  # rejected drafts, and what lies beyond the end
            tokens[n] = torch.cat([tokens[n][: count + 1], torch.full_like(true[n][: K - count], 0.7)])
        outs.append(launch(tokens, (1 + K, 1, start, replay, 1))[: count + 1])
        start, replay = start + 1 + count, count
    assert torch.equal(torch.cat(outs), whole)
    launch({n: torch.zeros_like(true[n][:1]) for n in names}, (1, 1, start, replay, 1))  # folds the last drafts
    assert torch.equal(true["state"][1], final)


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
