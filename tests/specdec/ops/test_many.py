"""SwiGLU experts of prompts in Triton's interpreter, against one expert after the other; compiled for sm_90."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("tests/gpu runs the kernels compiled", allow_module_level=True)

from specdec.ops.mixtures import PLAIN, Gating, many_kernel, routed_kernel
from specdec.ops.mixtures.many_kernel import better_by_many, launch_many
from specdec.ops.mixtures.routed import routed_experts
from specdec.ops.mixtures.routed_kernel import launch_routed, tilings_of
from tests.compiled import printed
from tests.specdec.ops.test_routed import error, made, swiglu_experts

NONE = (None, None)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which small matrices have several."""
    from specdec.ops.mixtures import grouping_kernel

    monkeypatch.setattr(many_kernel, "TILE", 16)
    monkeypatch.setattr(grouping_kernel, "TILE", 16)
    for name, size in (("_ROWS", 16), ("_DOWN_ROWS", 32), ("_COLUMNS", 32)):
        monkeypatch.setattr(many_kernel, name, size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "chosen", "experts", "hidden", "inner"),
    [
        *((5, 3, 8, 40, 48), (60, 4, 6, 80, 40), (20, 8, 130, 32, 40)),
        *(pytest.param(*own, marks=pytest.mark.long) for own in ((2, 1, 8, 64, 32), (90, 2, 3, 64, 24))),
    ],
)
@pytest.mark.cases(1)
def test_each_pair_is_its_experts(tokens: int, chosen: int, experts: int, hidden: int, inner: int) -> None:
    """Odd widths, experts without tokens, whole tiles and halves; one program has more than one tile."""
    x, gate_up, down, index = made(tokens, chosen, experts, hidden, inner)
    found = launch_many(x, gate_up, down, index, NONE, NONE, PLAIN)
    assert error(found, swiglu_experts(x, gate_up, down, index)) < 1e-3


@pytest.mark.parametrize("left", [7, 8, 9, 15, 16, 17])
def test_tiles_of_every_size(left: int) -> None:
    """Of 16 pairs, or of 8 where no more are left."""
    x, gate_up, down, _ = made(2 * left + 1, 1, 4, 40, 24)
    index = torch.tensor([3] * left + [1] * left + [0])[:, None]
    found = launch_many(x, gate_up, down, index, NONE, NONE, PLAIN)
    assert error(found, swiglu_experts(x, gate_up, down, index)) < 1e-3


def test_nan_in_the_other_experts() -> None:
    x, gate_up, down, _ = made(40, 1, 5, 48, 24)
    index = torch.full((40, 1), 3)
    right = swiglu_experts(x, gate_up, down, index)
    gate_up[[0, 1, 2, 4]] = down[[0, 1, 2, 4]] = float("nan")
    assert error(launch_many(x, gate_up, down, index, NONE, NONE, PLAIN), right) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("stored", "interleaved"), [("half", False), ("mxfp4", False), ("mxfp4", True)])
@pytest.mark.thorough
def test_biases_clamps_and_four_bits(stored: str, interleaved: bool) -> None:
    """Rows in turns are taken apart where they are multiplied out."""
    x, gate_up, down, index = made(60, 2, 4, 96, 64)
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = NONE
    if stored == "mxfp4":
        gate_up, down = torch.randint(256, (4, 128, 48)).byte(), torch.randint(256, (4, 96, 32)).byte()
        scales = torch.randint(118, 122, (4, 128, 3)).byte(), torch.randint(118, 122, (4, 96, 2)).byte()
    biases = torch.randn(4, 128).half(), torch.randn(4, 96).half()
    right = routed_experts(x, index, gate_up, down, *scales, *biases, interleaved, 1.7, 0.5)
    gating = Gating(interleaved, 1.7, 0.5)
    found = launch_many(x, gate_up, down, index, scales, biases, gating)
    assert error(found, right) < 2e-3
    assert error(launch_many(x, gate_up, down, index, scales, NONE, gating), right) > 0.05
    assert error(launch_many(x, gate_up, down, index, scales, biases, Gating(interleaved, 1.7)), right) > 0.05


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.cases(1)
def test_biases_of_odd_sizes_and_a_limit_of_zero(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_kernel, "_ROWS", rows)
    x, gate_up, down, index = made(20, 2, 4, 40, 24)
    biases = torch.randn(4, 48).half(), torch.randn(4, 40).half()
    for limit in (0.5, 0.0):
        right = routed_experts(x, index, gate_up, down, *NONE, *biases, False, 1.7, limit)
        assert error(launch_many(x, gate_up, down, index, NONE, biases, Gating(False, 1.7, limit)), right) < 2e-3


@pytest.mark.parametrize("nan", [slice(0, 24), slice(24, 48)], ids=["gate", "up"])
@pytest.mark.parametrize("form", [launch_many, launch_routed])
def test_nan_stays_nan_where_it_is_clamped(nan: slice, form: Any) -> None:
    x, gate_up, down, index = made(6, 2, 4, 40, 24)
    bias = torch.zeros(4, 48).half()
    bias[int(index[0, 0]), nan] = float("nan")
    found = form(x, gate_up, down, index, NONE, (bias, None), Gating(False, 1.7, 0.5))
    own = index == index[0, 0]
    assert found[own].isnan().all() and found[~own].isfinite().all()


@pytest.mark.slow
def test_what_launch_routed_hands_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales, biases and padding, where no tilings are given."""
    calls = []
    monkeypatch.setattr(routed_kernel, "better_by_many", lambda *_: True)
    monkeypatch.setattr(routed_kernel, "launch_many", lambda *given: calls.append(1) or launch_many(*given))
    x, _, _, index = made(30, 2, 4, 96, 64)
    gate_up, down = torch.randint(256, (4, 128, 48)).byte(), torch.randint(256, (4, 96, 32)).byte()
    scales = torch.randint(118, 122, (4, 128, 3)).byte(), torch.randint(118, 122, (4, 96, 2)).byte()
    biases = torch.randn(4, 128).half(), torch.randn(4, 96).half()
    slots, chosen = torch.tensor([40] * 7 + [3] * 23), index.clone()
    chosen[7:] = index[0]
    right = routed_experts(x, chosen, gate_up, down, *scales, *biases, True, 1.7, 0.5)
    given = x, gate_up, down, index, scales, biases, Gating(True, 1.7, 0.5)
    assert error(launch_routed(*given, padding=(slots, 16)), right) < 2e-3 and len(calls) == 1
    launch_routed(*given, tilings=tilings_of(60, 4, "mxfp4"))
    assert len(calls) == 1


def test_a_rows_sums_do_not_depend_on_its_place() -> None:
    x, gate_up, down, index = made(30, 2, 4, 48, 32)
    whole = launch_many(x, gate_up, down, index, NONE, NONE, PLAIN)
    assert torch.equal(launch_many(x[9:20], gate_up, down, index[9:20], NONE, NONE, PLAIN), whole[9:20])


def test_planted_defects_are_seen() -> None:
    """An expert that is skipped; a weight of the wrong token."""
    x, gate_up, down, index = made(24, 2, 4, 48, 32)
    right = swiglu_experts(x, gate_up, down, index)
    skipped = gate_up.clone()
    skipped[int(index[0, 0])] = 0
    assert error(launch_many(x, skipped, down, index, NONE, NONE, PLAIN), right) > 0.1
    assert error(launch_many(x.roll(1, 0), gate_up, down, index, NONE, NONE, PLAIN), right) > 0.1


def test_padding_and_what_no_expert_has_chosen() -> None:
    x, gate_up, down, index = made(7, 2, 6, 64, 32)
    slots = torch.tensor([40, 41, 3, 55, 16, 0, 0])
    right = swiglu_experts(x, gate_up, down, index)
    found = launch_many(x, gate_up, down, index, NONE, NONE, PLAIN, (slots, 16))
    assert error(found[[0, 1, 3, 4]], right[[0, 1, 3, 4]]) < 1e-3


def test_who_takes_this_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous matrices in half precision with many pairs an expert, gate's rows before up's; MXFP4 with more,
    as long as what is multiplied out stays small. On Hopper alone."""
    x, gate_up, down, _ = made(4, 2, 4, 48, 32)
    assert not better_by_many(x, gate_up, down, 10_000, PLAIN)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert better_by_many(x, gate_up, down, 193, PLAIN)
    assert not better_by_many(x, gate_up, down, 192, PLAIN)
    assert not better_by_many(x, gate_up, down, 193, Gating(interleaved=True))
    assert not better_by_many(x, gate_up.transpose(1, 2), down, 193, PLAIN)
    assert not better_by_many(x, gate_up[..., :44].contiguous(), down, 193, PLAIN)
    assert not better_by_many(x.bfloat16(), gate_up, down, 193, PLAIN)
    moved = torch.empty(down.numel() + 1).half()[1:].view_as(down)
    assert not better_by_many(x, gate_up, moved, 193, PLAIN)
    packed = torch.zeros(4, 64, 24).byte(), torch.zeros(4, 48, 16).byte()
    assert better_by_many(x, *packed, 641, Gating(interleaved=True)) and not better_by_many(x, *packed, 640, PLAIN)
    monkeypatch.setattr(many_kernel, "_MOST_MULTIPLIED_OUT", 4 * packed[0].numel() - 1)
    assert not better_by_many(x, *packed, 641, PLAIN)
    monkeypatch.setattr(many_kernel, "_MOST_MULTIPLIED_OUT", 4 * packed[0].numel())
    wide = torch.zeros(4, 64, 48).byte()
    assert better_by_many(x, *packed, 641, PLAIN) and not better_by_many(x, wide[..., :24], packed[1], 641, PLAIN)
    for other in ((10, 0), (8, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, other=other: other)
        assert not better_by_many(x, gate_up, down, 193, PLAIN)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not better_by_many(x, gate_up, down, 193, PLAIN)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from specdec.ops.mixtures import many_kernel as many

KINDS = dict.fromkeys(("order_ptr", "offset_ptr", "tile_ptr", "num_tiles_ptr"), "*i32")
KINDS |= {"alpha": "fp32", "limit": "fp32", "x": "tensordesc<bf16[128, 64]>"}
for kernel, rows, more in ((many._gate_up_kernel, many._ROWS, {"CLAMPED": True, "EVEN": False}),
                           (many._down_kernel, many._DOWN_ROWS, {})):
    constants = {"PAIRS": many.TILE, "ROWS": rows, "COLUMNS": many._COLUMNS, "DEPENDENT": True} | more
    signature, places, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        own = KINDS | {"stack": f"tensordesc<bf16[{rows}, {many._COLUMNS}]>"}
        other = own.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        signature[name] = "constexpr" if name in constants else other
        if name in constants:
            places[(i,)] = constants[name]
        elif name not in ("alpha", "limit", "x", "stack", "top_k"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=attributes)
    options = {"num_warps": 8, "num_stages": 4}
    assert kernel.params[kernel.arg_names.index("most_tiles")].do_not_specialize
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = made.asm["ptx"]
    print("wgmma" in ptx, "cp.async.bulk.tensor" in ptx, made.metadata.shared <= 232448)
"""


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    """With its own matmul instruction and its memory accelerator, within a multiprocessor's shared memory."""
    assert printed(COMPILE).splitlines() == ["True True True"] * 2
