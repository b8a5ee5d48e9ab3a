"""What the rewriting of the compiler's graph finds, what it leaves, and that the results stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

from specdec.compiling import fuse_siblings
from specdec.rewriting import Rewriting
from tests.specdec.test_compiling import Block

HALF = torch.bfloat16
TOKENS = 5


class Counted(Rewriting):
    """Counts operators before and after."""

    def __init__(self) -> None:
        self.before: Counter[str] = Counter()
        self.after: Counter[str] = Counter()

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.before = operators(graph)
        super().__call__(graph)
        graph.eliminate_dead_code()
        self.after = operators(graph)


def operators(graph: torch.fx.Graph) -> Counter[str]:
    names = (getattr(node.target, "overloadpacket", None) for node in graph.nodes if node.op == "call_function")
    return Counter(name.__name__ for name in names if name is not None)


def compiled(run: Callable[..., torch.Tensor], *args: torch.Tensor) -> tuple[torch.Tensor, Counted]:
    """Compile with any number of tokens: the axes that have TOKENS entries."""
    torch._dynamo.reset()
    for x in args:
        for axis in range(x.dim()):
            if x.shape[axis] == TOKENS:
                torch._dynamo.mark_dynamic(x, axis)
    counted = Counted()
    settings = {"post_grad_custom_pre_pass": counted, "force_disable_caches": True}
    with torch.no_grad(), torch._inductor.config.patch(settings), torch._dynamo.config.patch(specialize_float=True):
        return torch.compile(run, fullgraph=True)(*args), counted


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
def test_one_product_a_group_of_siblings(bias: bool) -> None:
    block, x = Block(bias).requires_grad_(False), torch.randn(TOKENS, 16)
    before = block(x)
    fuse_siblings(block, lambda: block(x))
    out, counted = compiled(block, x)
    assert counted.before["mm"] + counted.before["addmm"] == 8
    products = ("mm", "addmm", "few_tokens_linear")
    assert sum(counted.after[name] for name in products) == 5  # q+k+v, o, gate+up, tied, head
    assert torch.allclose(out, before, atol=1e-5)


class Norm(nn.Module):
    """LlamaRMSNorm as transformers writes it; `shift` makes it Gemma's, with one more than the weight in float32."""

    def __init__(self, width: int, shift: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=HALF), requires_grad=False)
        self.shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        if self.shift:
            return (wide * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)


class Residual(nn.Module):
    """A sum that is normed, and read once more behind the norm."""

    def __init__(self, shift: bool = False) -> None:
        super().__init__()
        self.norm, self.first = Norm(64, shift), Norm(64, shift)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        residual = residual + self.first(x)
        return self.norm(residual) * 2 + residual


@pytest.mark.slow
def test_norms_are_one_operator_with_their_sum() -> None:
    model, x, residual = Residual(), torch.randn(1, TOKENS, 64, dtype=HALF), torch.randn(1, TOKENS, 64, dtype=HALF)
    out, counted = compiled(model, x, residual)
    assert (counted.after["rms_norm"], counted.after["add_rms_norm"], counted.after["rsqrt"]) == (1, 1, 0)
    assert torch.allclose(out.float(), model(x, residual).float(), rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Residual(shift=True), torch.randn(1, TOKENS, 64, dtype=HALF)),
        (Residual().float(), torch.randn(1, TOKENS, 64)),
        (Residual(), torch.randn(2, TOKENS, 64, dtype=HALF)),
        (Residual(), torch.randn(TOKENS, 64, dtype=HALF)),
    ],
    ids=["weight plus one", "float32", "two sequences", "no sequences"],
)
def test_other_norms_stay(model: Residual, x: torch.Tensor) -> None:
    out, counted = compiled(model, x, x.flip(-1))
    assert (counted.after["rms_norm"] + counted.after["add_rms_norm"], counted.after["rsqrt"]) == (0, 2)
    assert torch.allclose(out.float(), model(x, x.flip(-1)).float(), rtol=1e-2, atol=2e-2)


@pytest.mark.slow
def test_a_sum_of_unlike_terms_is_no_residual() -> None:
    norm = Norm(64)
    x, bias = torch.randn(1, TOKENS, 64, dtype=HALF), torch.randn(64, dtype=HALF)
    out, counted = compiled(lambda x, bias: norm(x + bias), x, bias)
    assert (counted.after["rms_norm"], counted.after["add_rms_norm"]) == (1, 0)
    assert torch.allclose(out.float(), norm(x + bias).float(), rtol=1e-2, atol=1e-2)


def turned(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = q * cos + turned(q) * sin, k * cos + turned(k) * sin
    return torch.cat((q, k), 1)


def swapped(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """A rotation the other way round: not ours to take."""
    return rotate(q.flip(-1), k, cos, sin) + turned(torch.cat((q, k), 1)) * cos.unsqueeze(1)


def read_at_once(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first result is read before the second is there, as an attention operator's reshapes do."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q = (q * cos + turned(q) * sin).transpose(1, 2)[0].relu()
    k = (k * cos + turned(k) * sin).transpose(1, 2)[0].relu()
    return torch.cat((q, k), 1)


def one_after_the_other(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The second rotation needs the first."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q = q * cos + turned(q) * sin
    k = k + q[:, : k.shape[1]]
    return k * cos + turned(k) * sin


def angles(dtype: torch.dtype, tokens: int = TOKENS, dim: int = 16) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(3)
    shapes = ((1, tokens, 4, dim), (1, tokens, 2, dim), (1, tokens, dim), (1, tokens, dim))
    q, k, cos, sin = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return q.transpose(1, 2), k.transpose(1, 2), cos, sin


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "dtype", "found"),
    [
        (rotate, HALF, 1),
        (swapped, HALF, 1),
        (read_at_once, HALF, 1),
        (rotate, torch.float32, 0),
        (one_after_the_other, HALF, 0),
    ],
)
def test_queries_and_keys_are_rotated_at_once(run: Callable[..., torch.Tensor], dtype: torch.dtype, found: int) -> None:
    args = angles(dtype)
    out, counted = compiled(run, *args)
    assert counted.after["rotated"] == found
    assert torch.allclose(out.float(), run(*args).float(), rtol=2e-2, atol=4e-2)
