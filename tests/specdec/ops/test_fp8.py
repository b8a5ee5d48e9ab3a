"""Operators in fine-grained FP8: quantised as the published rule says, multiplied by both scales; and their kernels in
Triton's interpreter, which loses the carry of an 8-bit float that is rounded up to a power of two."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.finegrained_fp8 import FP8Linear

from specdec.compiler.siblings import SiblingFp8Linear, fuse_siblings
from specdec.ops.fp8 import FP8, fp8_linear, fp8_matmul, fp8_quantise, fp8_quantise_by, reference_matmul
from specdec.ops.mixtures.paired import expert_matmul
from specdec.wrapped.alterations import Alterations
from specdec.wrapped.quantised_layers import Fp8Layers
from tests.fp8 import multiplied_out, quantised, rounded

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu runs the kernels compiled"
)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def operands(tokens: int, rows: int, width: int) -> tuple[torch.Tensor, ...]:
    """Quantised x with scales, and a weight with scales that differ by block."""
    x = torch.randn(tokens, width) * torch.rand(tokens, -(-width // 128)).repeat_interleave(128, 1)[:, :width]
    weight = torch.randn(rows, width).to(FP8)
    return *fp8_quantise(x), weight, torch.rand(-(-rows // 128), -(-width // 128)) + 0.2


def error(ours: torch.Tensor, right: torch.Tensor) -> float:
    return float((ours.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize("width", [128, 200, 384])
@pytest.mark.parametrize("static", [False, True])
def test_a_layer_is_the_product_of_what_was_rounded(width: int, static: bool) -> None:
    x, plain, bias = torch.randn(2, 3, width), torch.randn(200, width), torch.randn(200)
    weight, scale = quantised(plain)
    by = torch.tensor(0.01) if static else None
    right = rounded(x, 0.01 if static else None).double() @ multiplied_out(weight, scale).t() + bias
    assert error(fp8_linear(x, weight, scale, bias, by), right) < 1e-6
    assert error(right - bias, x.double() @ plain.double().t()) < 0.06, "8 bits are about as good as they can be"


def test_a_group_of_zeros_stays_zeros() -> None:
    x = torch.randn(2, 256)
    x[0, :128] = 0
    values, scales = fp8_quantise(x)
    assert scales[0, 0] == 0 and not values[0, :128].float().any() and bool(values[0, 128:].float().any())


@interpreted
@pytest.mark.parametrize("width", [256, 200])
def test_the_kernel_that_quantises(width: int) -> None:
    from specdec.ops.fp8_kernel import launch_quantise

    x = torch.randn(3, 2 * width, dtype=torch.float16)[:, width:]
    (values, scales), (right, right_scales) = launch_quantise(x), fp8_quantise(x)
    assert torch.equal(scales, right_scales)
    lost = right.view(torch.uint8).int() - values.view(torch.uint8).int()
    rounded_up = right.view(torch.uint8) % 8 == 0
    assert not (lost[~rounded_up] > 0).any(), "only a carry into the exponent is lost, which the interpreter forgets"
    assert set(lost.unique().tolist()) <= {-1, 0, 8} and (lost != 0).float().mean() < 0.04  # -1: a tie, rounded up


@interpreted
def test_the_kernel_keeps_a_group_of_zeros() -> None:
    from specdec.ops.fp8_kernel import launch_quantise

    x = torch.randn(2, 256).half()
    x[0, :128] = 0
    values, scales = launch_quantise(x)
    assert scales[0, 0] == 0 and not values[0, :128].float().any() and bool(scales[0, 1:].all() and scales[1].all())


@interpreted
@pytest.mark.parametrize("width", [96, 1160])
def test_kernels_that_end_in_8_bits_are_the_two_they_are_made_of(width: int) -> None:
    """To the bit: norms of an input and of a sum, gated activations; groups that are cut, more than one program has."""
    from specdec.ops.elementwise_kernel import (
        launch_norm,
        launch_norm_fp8,
        launch_silu_product,
        launch_silu_product_fp8,
    )
    from specdec.ops.fp8_kernel import launch_quantise

    x, other = torch.randn(3, 2 * width, dtype=torch.float16).split(width, 1)
    weight = torch.randn(width, dtype=torch.float16)

    def same(ours: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
        return torch.equal(ours[0].view(torch.uint8), right[0].view(torch.uint8)) and torch.equal(ours[1], right[1])

    assert same(launch_silu_product_fp8(x, other), launch_quantise(launch_silu_product(x, other)))
    for residual in (None, other):
        (total, *ours), (sums, normed) = (
            launch_norm_fp8(x, residual, weight, 1e-5),
            launch_norm(x, residual, weight, 1e-5),
        )
        assert torch.equal(total, sums) and same((ours[0], ours[1]), launch_quantise(normed))


@interpreted
@pytest.mark.parametrize(("tokens", "rows", "width"), [(3, 100, 256), (18, 160, 200)])
@pytest.mark.parametrize("weight_first", [False, True])
@pytest.mark.cases(1)
def test_the_kernel_that_multiplies(tokens: int, rows: int, width: int, weight_first: bool) -> None:
    """Rows that fill no tile, blocks that are cut, tokens in two tiles."""
    from specdec.ops.fp8_kernel import Fp8Tiling, launch_fp8_matmul

    x, x_scale, weight, scale = operands(tokens, rows, width)
    right = reference_matmul(x, x_scale, weight, scale)
    tiling = Fp8Tiling(16, 64 if weight_first else 32, weight_first, 4, 2)
    assert error(launch_fp8_matmul(x, x_scale, weight, scale, torch.float32, tiling), right) < 1e-6
    wrong = launch_fp8_matmul(x, x_scale, weight, scale.roll(1, 1), torch.float32, tiling)
    assert error(wrong, right) > 0.05


@interpreted
@pytest.mark.parametrize(
    ("width", "at_once", "splits", "parts"), [(512, 1, 4, 4), (640, 2, 2, 2), (600, 1, 3, 3), (600, 4, 3, 2)]
)
@pytest.mark.cases(1)
def test_several_programs_share_the_columns_of_a_row(
    width: int, at_once: int, splits: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and blocks that are cut, shares of different size; the parts are added in order, in a launch of its own."""
    from specdec.ops import fp8_kernel

    x, x_scale, weight, scale = operands(3, 100, width)
    tiling, seen = fp8_kernel.Fp8Tiling(16, 64, True, 4, 2, at_once, splits), []
    kernel: Any = fp8_kernel.sum_kernel

    class Spy:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **options: Any) -> Any:
                seen.append(args[0].clone())
                return kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(fp8_kernel, "sum_kernel", Spy())
    ours = fp8_kernel.launch_fp8_matmul(x, x_scale, weight, scale, torch.float32, tiling)
    assert error(ours, reference_matmul(x, x_scale, weight, scale)) < 1e-6
    (sums,) = seen
    assert len(sums) == parts and bool((sums.flatten(1).norm(dim=1) > 0).all())
    total = sums[0]
    for part in sums[1:]:
        total = total + part
    assert torch.equal(ours, total)
    alone = fp8_kernel.launch_fp8_matmul(x[1:2], x_scale[1:2], weight, scale, torch.float32, tiling)
    assert torch.equal(alone[0], ours[1]), "not by the other rows"


@pytest.mark.parametrize("rows", [4096, 6144])
def test_narrow_weights_have_programs_enough(rows: int) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from specdec.ops.fp8_kernel import tiling_of

    for tokens, width in [(1, 4096), (16, 14_336), (48, 4096)]:
        tile = tiling_of(tokens, rows, width)
        assert 1.9 * 132 <= -(-rows // tile.rows) * -(-(width // 128) // tile.share(width // 128)) <= 3 * 132
    assert {tiling_of(tokens, rows, 128).splits for tokens in (1, 48)} == {1}


@pytest.mark.parametrize("tokens", [65, 96, 192, 384, 768])
def test_many_tokens_leave_no_multiprocessor_idle(tokens: int) -> None:
    """A program on every one of 132, or one short of two; three of them fit where there are more turns of two."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from specdec.ops.fp8_kernel import tiling_of

    for rows, width in [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)]:
        tile, blocks = tiling_of(tokens, rows, width), width // 128
        parts = -(-blocks // tile.share(blocks))
        programs = -(-tokens // tile.tokens) * -(-rows // tile.rows) * parts
        assert programs >= 128 and (parts == 1 or tile.share(blocks) >= 24)
        each = (227 << 10) // (tile.stages * 128 * (tile.tokens + tile.rows))
        assert each >= 3 or -(-programs // (2 * 132)) == -(-programs // (3 * 132))


def test_experts_of_pairs_with_inputs_of_their_own() -> None:
    """Each pair is one matmul; of the second matmul of a mixture every pair has its own input."""
    x = torch.randn(3, 2, 200)
    stack, scales = torch.randn(3, 160, 200).to(FP8), torch.rand(3, 2, 2) + 0.2
    index = torch.tensor([[0, 2], [2, 1], [0, 1]])
    for own in (1, 2):
        found = expert_matmul(x[:, :own], stack, scales, index)
        for token, place in itertools.product(range(3), range(2)):
            expert, pair = int(index[token, place]), fp8_quantise(x[token, place if own == 2 else 0][None])
            assert error(found[token, place], reference_matmul(*pair, stack[expert], scales[expert])[0]) < 1e-6


@interpreted
def test_more_pairs_of_an_expert_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 pairs of each of two experts, sixteen at a time."""
    from specdec.ops.mixtures import routed_kernel

    monkeypatch.setattr(routed_kernel, "launch_quantise", fp8_quantise)  # Triton's interpreter rounds otherwise
    x = torch.randn(40, 1, 128)
    stack, scales = torch.randn(2, 160, 128).to(FP8), torch.rand(2, 2, 1) + 0.2
    index = torch.tensor([[1, 0]] * 40)
    out = routed_kernel.launch_expert_matmul(x, stack, scales, index)
    assert error(out, expert_matmul(x, stack, scales, index)) < 1e-6


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("pairs", [(1, 1, 3), (4, 1, 3), (9, 2, 2)])
@pytest.mark.cases(1)
def test_the_kernel_of_experts(pairs: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One token; fewer pairs than experts and more; one row of x a token, and one a pair."""
    from specdec.ops.mixtures import routed_kernel

    monkeypatch.setattr(routed_kernel, "launch_quantise", fp8_quantise)
    tokens, own, chosen = pairs
    x = torch.randn(tokens, own, 200)
    stack, scales = torch.randn(16, 160, 200).to(FP8), torch.rand(16, 2, 2) + 0.2
    index = torch.rand(tokens, 16).topk(chosen, -1).indices
    out, right = routed_kernel.launch_expert_matmul(x, stack, scales, index), expert_matmul(x, stack, scales, index)
    assert error(out, right) < 1e-6
    rounded, of_x = fp8_quantise(x[0, :1])
    plain = rounded[0].float() * of_x[0].repeat_interleave(128)[:200]
    one = multiplied_out(stack[index[0, 0]], scales[index[0, 0]]).float() @ plain
    assert error(right[0, 0], one) < 1e-6


class Block(nn.Module):
    """q, k, v and o, gate and up in FP8; v ends inside a block."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"q": (256, 256), "v": (200, 256), "k": (128, 256), "gate": (384, 200), "up": (384, 200)}
        for name, (rows, width) in sizes.items():
            layer = FP8Linear(width, rows, (128, 128), has_bias=name in "qkv")
            layer.weight.data, layer.weight_scale_inv.data = quantised(torch.randn(rows, width))
            if layer.bias is not None:
                nn.init.normal_(layer.bias)
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: Any = self.q(x)[..., :200] * self.v(x) + self.k(x).sum(-1, keepdim=True)
        return self.gate(y) * self.up(y)


@pytest.fixture
def block() -> Block:
    return Block().requires_grad_(False).eval()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*runs on a CPU")
@pytest.mark.thorough
def test_siblings_are_one_matmul_of_one_quantised_input(block: Block) -> None:
    """In compiled code; the layers are what they were afterwards, in memory of their own."""
    from tests.specdec.compiler.test_passes import rewritten

    x, layers = torch.randn(5, 256), Fp8Layers(block)
    before, values = block(x), {name: p.clone() for name, p in block.named_parameters()}
    out, alone = rewritten(block, x)
    assert torch.equal(out, before) and (alone["fp8_quantise"], alone["fp8_matmul"]) == (2, 5)
    alterations = Alterations(block)
    assert fuse_siblings(block, lambda: block(x), alterations) == 2
    assert all(isinstance(m, SiblingFp8Linear) and not m.is_stale for m in block.children())
    assert torch.equal(block(x), before)
    out, fused = rewritten(block, x)
    torch.testing.assert_close(out, before)
    assert (fused["fp8_quantise"], fused["fp8_matmul"]) == (2, 2)
    alterations.undo()
    layers.release()
    assert {type(m) for m in block.children()} == {FP8Linear}
    for name, p in block.named_parameters():
        assert torch.equal(
            p.view(torch.uint8) if p.dtype == FP8 else p,
            values[name].view(torch.uint8) if p.dtype == FP8 else values[name],
        )
        assert p.untyped_storage().nbytes() == p.nbytes


@pytest.mark.filterwarnings("ignore:.*runs on a CPU")
def test_two_layers_that_end_inside_a_block_are_not_fused(block: Block) -> None:
    block.k = FP8Linear(256, 100, (128, 128), has_bias=True)
    block.k.weight.data, block.k.weight_scale_inv.data = quantised(torch.randn(100, 256))
    nn.init.normal_(block.k.bias)
    block.eval().requires_grad_(False)
    layers = Fp8Layers(block)
    assert fuse_siblings(block, lambda: block(torch.randn(5, 256)), Alterations(block)) == 1
    layers.release()


@pytest.mark.slow
def test_operators_are_registered_as_the_compiler_needs_them() -> None:
    x, x_scale, weight, scale = operands(3, 100, 200)
    index = torch.tensor([[0, 1], [1, 0], [1, 1]])
    stack, scales = torch.stack([weight.view(torch.uint8)] * 2).view(FP8), torch.stack([scale] * 2)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (fp8_quantise, (torch.randn(3, 200),)),
        (fp8_quantise_by, (torch.randn(3, 200), torch.tensor(0.01))),
        (fp8_matmul, (x, x_scale, weight, scale, torch.bfloat16)),
        (expert_matmul, (torch.randn(3, 1, 200), stack, scales, index)),
    ]
    for operator, arguments in calls:  # torch has too few operators in 8 bits for its other checks
        torch.library.opcheck(operator, arguments, test_utils=("test_faketensor", "test_aot_dispatch_dynamic"))
