"""Mixtures of SwiGLU experts in Triton's interpreter: each pair's result against one that multiplies pair by pair."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("tests/gpu runs the kernels compiled", allow_module_level=True)

from specdec.ops.experts import swiglu_experts
from specdec.ops.routed_kernel import Tiling, group_pairs, launch_routed, tilings_of

ROOT = Path(__file__).parents[3]


def made(
    tokens: int, chosen: int, experts: int, hidden: int, inner: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, hidden).half()
    gate_up = (torch.randn(experts, 2 * inner, hidden) / hidden**0.5).half()
    down = (torch.randn(experts, hidden, inner) / inner**0.5).half()
    return x, gate_up, down, torch.rand(tokens, experts).topk(chosen, -1).indices


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found.float() - right.float()).norm() / right.float().norm())


@pytest.mark.parametrize(
    ("tokens", "chosen", "experts", "hidden", "inner"),
    [
        (1, 2, 4, 64, 32),
        (1, 10, 512, 48, 32),
        (2, 1, 8, 64, 32),
        (5, 3, 8, 33, 48),
        (40, 4, 6, 80, 40),
        (64, 2, 3, 64, 24),
        (3, 10, 512, 48, 32),
        (20, 8, 130, 32, 40),
    ],
)
@pytest.mark.parametrize("by_rows", [True, False])
def test_each_pair_is_its_experts(
    tokens: int, chosen: int, experts: int, hidden: int, inner: int, by_rows: bool
) -> None:
    """Odd widths, experts without tokens, more tokens of an expert than a tile has."""
    x, gate_up, down, index = made(tokens, chosen, experts, hidden, inner)
    tilings = tuple(Tiling(own.pairs, 32, 32, 4, 2, by_rows) for own in tilings_of(index.numel(), experts))
    found = launch_routed(x, gate_up, down, index, (tilings[0], tilings[1]))
    assert error(found, swiglu_experts(x, gate_up, down, index)) < 1e-3


@pytest.mark.parametrize("tokens", [9, 40])
def test_every_token_on_one_expert_and_nan_in_the_others(tokens: int) -> None:
    x, gate_up, down, _ = made(tokens, 1, 5, 48, 32)
    index = torch.full((tokens, 1), 3)
    right = swiglu_experts(x, gate_up, down, index)
    gate_up[[0, 1, 2, 4]] = down[[0, 1, 2, 4]] = float("nan")
    assert error(launch_routed(x, gate_up, down, index), right) < 1e-3


def test_transposed_stacks() -> None:
    x, gate_up, down, index = made(7, 2, 4, 48, 32)
    right = launch_routed(x, gate_up, down, index)
    stored = gate_up.transpose(1, 2).contiguous().transpose(1, 2), down.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(launch_routed(x, *stored, index), right)


def test_a_row_does_not_depend_on_the_others() -> None:
    x, gate_up, down, index = made(30, 3, 6, 64, 32)
    whole = launch_routed(x, gate_up, down, index)
    part = launch_routed(x[11:20], gate_up, down, index[11:20])
    assert torch.equal(part, whole[11:20])


def test_planted_defects_are_seen() -> None:
    """An expert that is skipped; a weight of the wrong token."""
    x, gate_up, down, index = made(12, 2, 4, 48, 32)
    right = swiglu_experts(x, gate_up, down, index)
    skipped = gate_up.clone()
    skipped[int(index[0, 0])] = 0
    assert error(launch_routed(x, skipped, down, index), right) > 0.1
    assert error(launch_routed(x.roll(1, 0), gate_up, down, index), right) > 0.1


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_groups(data: st.DataObject) -> None:
    """Every pair stands once, among those of its expert."""
    experts = data.draw(st.integers(1, 40))
    tokens, chosen = data.draw(st.integers(2, 20)), data.draw(st.integers(1, 5))
    ids = data.draw(
        st.lists(st.integers(0, experts - 1), min_size=tokens * chosen, max_size=tokens * chosen), label="experts"
    )
    groups = group_pairs(torch.tensor(ids).view(tokens, chosen), experts)
    offsets = groups.offsets.tolist()
    assert sorted(groups.order.tolist()) == list(range(len(ids))) and offsets[-1] == len(ids)
    for expert in range(experts):
        own = groups.order[offsets[expert] : offsets[expert + 1]].tolist()
        assert sorted(own) == [pair for pair, chosen_by in enumerate(ids) if chosen_by == expert]
    active = [expert for expert in groups.active.tolist() if expert >= 0]
    assert active == sorted(set(ids))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specdec.ops import routed_kernel as routed

KINDS = {"index_ptr": "*i64", "order_ptr": "*i32", "offset_ptr": "*i32", "active_ptr": "*i32", "count_ptr": "*i32"}

def shared(kernel, constants, warps=8, stages=3):
    signature, places, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        other = "*bf16" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else KINDS.get(name, other)
        if name in constants:
            places[(i,)] = constants[name]
        else:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "wgmma" in made.asm["ptx"] or kernel is routed._group_kernel
    return made.metadata.shared

most = [shared(routed._group_kernel, {"PAIRS": 16384, "EXPERTS": 1024})]
for pairs in (8, 500, 1024, 2000, 16384):
    for tile, kernel in zip(routed.tilings_of(pairs, 64), (routed._gate_up_kernel, routed._down_kernel)):
        for grouped in (True, False):
            sizes = {"TILE_PAIRS": tile.pairs, "TILE_ROWS": tile.rows, "TILE_WIDTH": tile.columns}
            constants = sizes | {"GROUPED": grouped, "EVEN": True, "BY_ROWS": tile.by_rows, "column_stride": 1}
            most.append(shared(kernel, constants, tile.warps, tile.stages))
print(max(most))
"""


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    """In its own matmul instruction, within a multiprocessor's shared memory."""
    around = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        cwd=ROOT,
        env=around | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) <= 232448
