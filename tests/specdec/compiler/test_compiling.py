"""Sibling projections are found and fused, and nothing changes for the module itself; cos and sin are computed once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from specdec.compiler.compiling import store_cos_sin
from specdec.compiler.siblings import SiblingLinear, fuse_siblings
from specdec.wrapped.alterations import Alterations


class Block(nn.Module):
    """q, k, v and gate, up beside layers that must stay alone."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(16, n, bias=bias) for n in (16, 8, 8))
        self.o = nn.Linear(16, 16)
        self.gate, self.up = nn.Linear(16, 32), nn.Linear(16, 32)
        self.tied = nn.Linear(16, 32)
        self.head = nn.Linear(16, 32)
        self.head.weight = self.tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.q(x) + torch.cat([self.k(x), self.v(x)], -1)
        z = self.o(y)
        return self.gate(z) * self.up(z) + self.tied(y) + self.head(y)


@pytest.fixture(params=[False, True], ids=["no bias", "bias"])
def block(request: pytest.FixtureRequest) -> Block:
    return Block(request.param).requires_grad_(False)


def test_siblings_are_found_and_nothing_changes(block: Block) -> None:
    x = torch.randn(3, 16)
    before, names = block(x), {name: p.clone() for name, p in block.named_parameters()}
    assert fuse_siblings(block, lambda: block(x), Alterations(block)) == 2
    fused = {name for name, module in block.named_modules() if isinstance(module, SiblingLinear)}
    assert fused == {"q", "k", "v", "gate", "up"}
    assert torch.equal(block(x), before)
    assert {n: p.shape for n, p in block.named_parameters()} == {n: p.shape for n, p in names.items()}
    assert all(torch.equal(p, names[n]) for n, p in block.named_parameters())


def test_fusing_twice_finds_nothing_more(block: Block) -> None:
    x = torch.randn(3, 16)
    fuse_siblings(block, lambda: block(x), Alterations(block))
    assert fuse_siblings(block, lambda: block(x), Alterations(block)) == 0


@pytest.mark.slow
@pytest.mark.cases(1)
def test_compiled_code_takes_the_sizes_of_fused_weights_as_constants(block: Block) -> None:
    """Else every stride of what it reads is an argument, and its kernels load a number at a time."""
    fuse_siblings(block, lambda: block(torch.randn(3, 16)), Alterations(block))
    symbols: list[torch.fx.Node] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> Callable[..., object]:
        symbols.extend(n for n in graph.graph.find_nodes(op="placeholder") if n.type is torch.SymInt)
        return graph.forward

    torch.compile(block, backend=backend, dynamic=True)(torch.randn(5, 16))
    assert len(symbols) == 1  # the number of tokens


def test_weights_share_one_tensor(block: Block) -> None:
    fuse_siblings(block, lambda: block(torch.randn(3, 16)), Alterations(block))
    storages = {m.weight.untyped_storage().data_ptr() for m in (block.q, block.k, block.v)}
    assert len(storages) == 1
    assert block.q.fused_weight.untyped_storage().data_ptr() in storages


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.rand(4))

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[:, None] * self.inv_freq
        return angles.cos(), angles.sin()


class Rotated(nn.Module):
    """Two layers that read the same cos and sin, with a matmul between; unlike, so that each has its own kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.rotary(positions)
        return self.second(self.first(x) * cos + sin) * sin - cos


@pytest.mark.slow
@pytest.mark.parametrize(("once", "kernels"), [(True, 1), pytest.param(False, 2, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_cos_and_sin_are_computed_once(once: bool, kernels: int) -> None:
    model, x, positions = Rotated().requires_grad_(False), torch.randn(5, 4), torch.arange(5)
    before = model(x, positions)
    if once:
        assert store_cos_sin(model, Alterations(model)) == 1
        assert torch.equal(model(x, positions), before)
    with torch.no_grad():
        out, code = run_and_get_code(torch.compile(model, fullgraph=True, dynamic=True), x, positions)
    assert torch.allclose(out, before, atol=1e-6)
    assert code[0].split("def call(")[0].count("std::cos(") == kernels
