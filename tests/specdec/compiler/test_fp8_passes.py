"""Norms and gated activations before FP8 layers end in 8 bits; what is read by anything else stays."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule
from transformers.integrations.finegrained_fp8 import FP8Linear

from specdec.compiler.passes import Rewriting
from specdec.compiler.siblings import fuse_siblings
from specdec.ops.elementwise import add_rms_norm, rms_norm, silu_product
from specdec.ops.fp8 import add_rms_norm_fp8, fp8_quantise, rms_norm_fp8, silu_product_fp8
from specdec.wrapped.alterations import Alterations
from specdec.wrapped.quantised_layers import Fp8Layers
from tests.fp8 import quantised
from tests.specdec.compiler.test_passes import Norm, any_tokens, operators

pytestmark = pytest.mark.filterwarnings("ignore:.*runs on a CPU")
TOKENS, HALF = 5, torch.bfloat16
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tests/gpu runs the kernels compiled"
)


class Layer(nn.Module):
    """q and k after a norm, gate, up and down after a norm of a sum; `read`: who else reads what is quantised."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.first, self.second, self.read = Norm(), Norm(), read
        sizes = {"q": (64, 64), "gate": (128, 64), "up": (128, 64), "down": (64, 128)}
        for name, (rows, width) in sizes.items():
            layer = FP8Linear(width, rows, (128, 128))
            layer.weight.data, layer.weight_scale_inv.data = quantised(torch.randn(rows, width))
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed: Any = self.first(x)
        x = x + self.q(normed)
        total = self.second(x)
        inner = nn.functional.silu(self.gate(total)) * self.up(total)
        out: torch.Tensor = x + self.down(inner)
        return out + normed + total + inner[..., :64] if self.read else out, x


def rewritten(layer: Layer, x: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Counter[str]]:
    """The layer's graph after our passes, run operator by operator."""
    any_tokens([x])
    after: Counter[str] = Counter()

    def compile_inference(module: GraphModule, _: Any) -> GraphModule:
        Rewriting()(module.graph)
        module.graph.lint()
        assert list(module.graph.nodes)[-1].op == "output"
        after.update(operators(module.graph))
        module.recompile()
        return module

    backend = aot_autograd(fw_compiler=compile_inference, decompositions=select_decomp_table())
    with torch.no_grad(), dynamo.patch(specialize_float=True):
        return torch.compile(layer, fullgraph=True, backend=backend)(x), after


@pytest.mark.slow
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.cases(1)
def test_what_only_fp8_layers_read_is_quantised_where_it_is_computed(
    read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer, x = Layer(read).eval().requires_grad_(False), torch.randn(1, TOKENS, 64, dtype=HALF)
    layers = Fp8Layers(layer)
    fuse_siblings(layer, lambda: layer(x), Alterations(layer))
    out, after = rewritten(layer, x)
    fused = [after[name] for name in ("rms_norm_fp8", "add_rms_norm_fp8", "silu_product_fp8")]
    plain = [after[name] for name in ("rms_norm", "add_rms_norm", "silu_product", "fp8_quantise")]
    assert (fused, plain) == (([0, 0, 0], [1, 1, 1, 3]) if read else ([1, 1, 1], [0, 0, 0, 0]))
    assert after["fp8_matmul"] == 3
    if not read:  # what is read elsewhere, too, stays apart in both graphs
        monkeypatch.setattr("specdec.compiler.passes.quantise_at_once", lambda graph: None)
        apart, before = rewritten(layer, x)
        assert before["fp8_quantise"] == 3 and all(map(torch.equal, out, apart)), "the same bits"
    layers.release()


def test_a_second_engine_finds_layers_that_the_first_has_fused() -> None:
    layer, x = Layer(False).eval().requires_grad_(False), torch.randn(1, TOKENS, 64, dtype=HALF)
    kinds = [type(module) for module in layer.modules()]
    first, fused = Fp8Layers(layer), Alterations(layer)
    assert fuse_siblings(layer, lambda: layer(x), fused) == 1
    second, also_fused = Fp8Layers(layer), Alterations(layer)
    fuse_siblings(layer, lambda: layer(x), also_fused)
    for alterations, layers in ((fused, first), (also_fused, second)):
        alterations.undo()
        layers.release()
    assert [type(module) for module in layer.modules()] == kinds


@pytest.mark.slow
def test_an_erased_graph_has_nothing_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators of the quantised results that nothing reads would run all the same: custom operators are not pure."""
    graphs: list[Graph] = []
    call = Rewriting.__call__

    def kept(self: Rewriting, graph: Graph) -> None:
        call(self, graph)
        graphs.append(graph)

    monkeypatch.setattr(Rewriting, "__call__", kept)
    torch.manual_seed(0)
    layer = Layer(False).eval().requires_grad_(False)
    layers = Fp8Layers(layer)
    rewritten(layer, torch.randn(1, TOKENS, 64, dtype=HALF))
    (graph,) = graphs
    unread = [node for node in graph.nodes if str(node.target).startswith("specdec.") and not node.users]
    assert not unread and any(str(node.target).startswith("specdec.") for node in graph.nodes)
    layers.release()


@interpreted
@pytest.mark.parametrize("width", [256, 200])
def test_the_fused_kernels_give_what_the_two_give(width: int) -> None:
    """But for what the interpreter loses of 8-bit floats, alike in both: see tests/specdec/ops/test_fp8.py."""
    from specdec.ops.elementwise_kernel import launch_norm_fp8, launch_silu_product_fp8
    from specdec.ops.fp8_kernel import launch_quantise

    torch.manual_seed(0)
    x, residual = torch.randn(2, 1, 3, width, dtype=torch.float16)
    weight = torch.randn(width, dtype=torch.float16)
    cases = [
        (launch_norm_fp8(x, None, weight, 1e-5)[1:], rms_norm(x, weight, 1e-5)[0]),
        (launch_norm_fp8(x, residual, weight, 1e-5)[1:], add_rms_norm(x, residual, weight, 1e-5)[1][0]),
        (launch_silu_product_fp8(x, residual), silu_product(x, residual)[0]),
    ]
    assert torch.equal(launch_norm_fp8(x, residual, weight, 1e-5)[0], x + residual)
    for (values, scales), plain in cases:
        right, right_scales = launch_quantise(plain)
        torch.testing.assert_close(scales, right_scales, rtol=2e-3, atol=0)
        assert (values.view(torch.uint8) != right.view(torch.uint8)).float().mean() < 0.05


def test_fused_operators_are_registered_as_the_compiler_needs_them() -> None:
    x, weight = torch.randn(1, 3, 200, dtype=HALF), torch.randn(200, dtype=HALF)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (rms_norm_fp8, (x, weight, 1e-5)),
        (add_rms_norm_fp8, (x, x.clone(), weight, 1e-5)),
        (silu_product_fp8, (x, x.clone())),
        (fp8_quantise, (x[0],)),
    ]
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=("test_faketensor",))
