"""What the rewriting of the compiler's graph finds, what it leaves, and that the results stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from fakes import eagle3_spec
from torch import nn
from torch._dynamo import config as dynamo
from torch._dynamo import mark_dynamic
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor
from torch._inductor.decomposition import select_decomp_table

from drafters.loops.head_passes import EaglePasses
from drafters.rope import rotate as rotate_in_float32
from specdec.compiler.passes import Rewriting
from specdec.compiler.siblings import fuse_siblings
from specdec.wrapped.alterations import Alterations
from tests.drafters.eagle3.test_head import make_head
from tests.specdec.compiler.test_compiling import Block

HALF, TOKENS = torch.bfloat16, 5
Run = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def operators(graph: torch.fx.Graph) -> Counter[str]:
    names = (getattr(node.target, "overloadpacket", None) for node in graph.nodes if node.op == "call_function")
    return Counter(name.__name__ for name in names if name is not None)


class Counted(Rewriting):
    """Counts operators before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Counter[str] = Counter()
        self.after: Counter[str] = Counter()

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.before = operators(graph)
        super().__call__(graph)
        graph.eliminate_dead_code()
        self.after = operators(graph)


def any_tokens(args: Sequence[torch.Tensor]) -> None:
    """Compile for any number of tokens: the axes that have TOKENS entries."""
    torch.compiler.reset()
    for x in args:
        for axis in range(x.dim()):
            if x.shape[axis] == TOKENS:
                mark_dynamic(x, axis)


def compiled(run: Run, *args: torch.Tensor) -> tuple[torch.Tensor, Counted]:
    """The whole compiler."""
    any_tokens(args)
    counted = Counted()
    settings = {"post_grad_custom_pre_pass": counted, "force_disable_caches": True}
    with torch.no_grad(), inductor.patch(settings), dynamo.patch(specialize_float=True):
        return torch.compile(run, fullgraph=True)(*args), counted


def rewritten(run: Run, *args: torch.Tensor) -> tuple[torch.Tensor, Counter[str]]:
    """The compiler's graph after our pass, run operator by operator: all but the making of kernels."""
    any_tokens(args)
    counted = Counted()

    def compile_inference(module: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        counted(module.graph)
        module.recompile()
        return module

    backend = aot_autograd(fw_compiler=compile_inference, decompositions=select_decomp_table())
    with torch.no_grad(), dynamo.patch(specialize_float=True):
        return torch.compile(run, fullgraph=True, backend=backend)(*args), counted.after


def assert_alike(ours: torch.Tensor, eager: torch.Tensor) -> None:
    """Up to what is rounded between operators, in half precision."""
    assert ours.dtype == eager.dtype
    torch.testing.assert_close(ours.double(), eager.double(), rtol=2e-2, atol=6e-2)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.thorough
def test_one_matmul_per_group_of_siblings(bias: bool) -> None:
    block, x = Block(bias).requires_grad_(False), torch.randn(TOKENS, 16)
    before = block(x)
    fuse_siblings(block, lambda: block(x), Alterations(block))
    out, counted = compiled(block, x)
    assert counted.before["mm"] + counted.before["addmm"] == 8
    matmuls = ("mm", "addmm", "few_tokens_linear")
    assert sum(counted.after[name] for name in matmuls) == 5  # q+k+v, o, gate+up, tied, head
    assert torch.allclose(out, before, atol=1e-5)


class Norm(nn.Module):
    """LlamaRMSNorm as transformers writes it."""

    def __init__(self, dtype: torch.dtype = HALF) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, dtype=dtype), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


class Residual(nn.Module):
    """A sum that is normed, and read once more after the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = Norm(), Norm()

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        residual = residual + self.first(x)
        return self.norm(residual) * 2 + residual


def hidden(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*(shape or (1, TOKENS, 64)), dtype=dtype)


@pytest.mark.slow
@pytest.mark.thorough
def test_norms_are_one_operator_with_their_sum() -> None:
    model, args = Residual(), (hidden(), hidden())
    out, counted = compiled(model, *args)
    assert (counted.after["rms_norm"], counted.after["add_rms_norm"], counted.after["rsqrt"]) == (1, 1, 0)
    assert_alike(out, model(*args))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_sum_of_transposed_terms_is_one_operator() -> None:
    norm, args = Norm(), (hidden(1, 64, TOKENS), hidden(1, 64, TOKENS))

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return norm(x.transpose(1, 2) + y.transpose(1, 2))

    out, counted = compiled(run, *args)
    assert counted.after["add_rms_norm"] == 1
    assert_alike(out, run(*args))


def scaled_by(norm: Norm, scale: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32) -> Run:
    """A norm that divides by something else than the root of the mean square."""

    def run(x: torch.Tensor) -> torch.Tensor:
        wide = x.to(dtype)
        return norm.weight * (wide * scale(wide)).to(x.dtype)

    return run


def mean_square(x: torch.Tensor) -> torch.Tensor:
    return x.pow(2).mean(-1, keepdim=True)


def other_norms() -> dict[str, tuple[Run, torch.Tensor]]:
    norm, x = Norm(), hidden()
    weight = norm.weight

    def plus_one(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(mean_square(wide) + 1e-5) * (1.0 + weight.float())).to(x.dtype)

    def computed_weight(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (weight * 2).relu() * (wide * torch.rsqrt(mean_square(wide) + 1e-5)).to(x.dtype)

    one = nn.Parameter(torch.randn(1, dtype=HALF), requires_grad=False)

    def one_weight(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return one * (wide * torch.rsqrt(mean_square(wide) + 1e-5)).to(x.dtype)

    def scale_read_twice(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(mean_square(wide) + 1e-5)
        return weight * (wide * scale).to(x.dtype) + scale.to(x.dtype)

    def matmul_with_another(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return weight * (wide.flip(-1) * torch.rsqrt(mean_square(wide) + 1e-5)).to(x.dtype)

    return {
        "weight plus one": (plus_one, x),
        "float32": (Norm(torch.float32), hidden(dtype=torch.float32)),
        "weight of another dtype": (Norm(torch.float32), x),
        "computed weight": (computed_weight, x),
        "two sequences": (norm, hidden(2, TOKENS, 64)),
        "no sequences": (norm, hidden(TOKENS, 64)),
        "heads": (norm, hidden(1, TOKENS, 3, 64)),
        "fourth power": (scaled_by(norm, lambda x: torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-5)), x),
        "rounded float64": (Norm(torch.float64), hidden(dtype=torch.float64)),
        "weight of one number": (one_weight, x),
        "mean over tokens": (scaled_by(norm, lambda x: torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5)), x),
        "sum": (scaled_by(norm, lambda x: torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-5)), x),
        "weighed epsilon": (scaled_by(norm, lambda x: torch.rsqrt(torch.add(mean_square(x), 0.1, alpha=20))), x),
        "epsilon a tensor": (scaled_by(norm, lambda x: torch.rsqrt(mean_square(x) + x[:, :, :1].abs())), x),
        "float64": (scaled_by(norm, lambda x: torch.rsqrt(mean_square(x) + 1e-5), torch.float64), x),
        "scale read twice": (scale_read_twice, x),
        "matmul with another": (matmul_with_another, x),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(other_norms()))
@pytest.mark.cases(1)
def test_other_norms_stay(name: str) -> None:
    run, x = other_norms()[name]
    out, after = rewritten(run, x)
    assert (after["rms_norm"], after["rsqrt"]) == (0, 1)
    assert_alike(out, run(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "add",
    [
        lambda x: x + x[0, 0],
        lambda x: torch.add(x, x.flip(-1), alpha=-3),
        lambda x: x + x.shape[1],
        lambda x: x + 0.5,
        lambda x: (x.float() + x.flip(-1).float()).to(x.dtype),
    ],
    ids=["broadcast", "weighed", "number of tokens", "constant", "in float32"],
)
@pytest.mark.cases(1)
def test_other_sums_are_no_residuals(add: Run) -> None:
    """The norm after them is one operator by itself."""
    norm, x = Norm(), hidden()
    out, after = rewritten(lambda x: norm(add(x)), x)
    assert (after["rms_norm"], after["add_rms_norm"]) == (1, 0)
    assert_alike(out, norm(add(x)))


def half_rotated(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((q * cos + half_rotated(q) * sin, k * cos + half_rotated(k) * sin), 1)


def rotating(turn: Run, add: Run = torch.add) -> Run:
    """Like `rotate`, with another turn of a head or another sum."""

    def run(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return torch.cat([add(x * cos, turn(x) * sin) for x in (q, k)], 1)

    return run


def read_at_once(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first result is read before the second is there, as an attention operator's reshapes do."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q = (q * cos + half_rotated(q) * sin).transpose(1, 2)[0].relu()
    k = (k * cos + half_rotated(k) * sin).transpose(1, 2)[0].relu()
    return torch.cat((q, k), 1)


def one_after_the_other(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The second rotation needs the first."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q = q * cos + half_rotated(q) * sin
    k = k + q[:, : k.shape[1]]
    return k * cos + half_rotated(k) * sin


def query_key_cos_sin(dtype: torch.dtype = HALF) -> tuple[torch.Tensor, ...]:
    shapes = ((1, TOKENS, 4, 16), (1, TOKENS, 2, 16), (1, TOKENS, 16), (1, TOKENS, 16))
    q, k, cos, sin = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return q.transpose(1, 2), k.transpose(1, 2), cos, sin


@pytest.mark.slow
@pytest.mark.parametrize("run", [pytest.param(rotate, marks=pytest.mark.long), read_at_once])
@pytest.mark.thorough
def test_queries_and_keys_are_rotated_at_once(run: Run) -> None:
    args = query_key_cos_sin()
    out, counted = compiled(run, *args)
    assert (counted.after["rotated"], counted.after["neg"]) == (1, 0)
    assert_alike(out, run(*args))


def other_rotations() -> dict[str, tuple[Run, tuple[torch.Tensor, ...]]]:
    args = query_key_cos_sin()
    q, k, cos, sin = args
    half = [x[..., :8] for x in args[2:]]
    return {
        "float32": (rotate, query_key_cos_sin(torch.float32)),
        "cos and sin of float32": (rotate, (q, k, cos.float(), sin.float())),
        "cos and sin of two sequences": (rotate, (q, k, cos.repeat(2, 1, 1), sin.repeat(2, 1, 1))),
        "two sequences": (rotate, (q.repeat(2, 1, 1, 1), k.repeat(2, 1, 1, 1), cos, sin)),
        "cos and sin of one token": (rotate, (q, k, cos[:, :1], sin[:, :1])),
        "one after the other": (one_after_the_other, args),
        "other way round": (rotating(lambda x: torch.cat((x[..., 8:], -x[..., :8]), -1)), args),
        "both negative": (rotating(lambda x: torch.cat((-x[..., 8:], -x[..., :8]), -1)), args),
        "another sign": (rotating(lambda x: torch.cat((x[..., 8:].abs(), x[..., :8]), -1)), args),
        "second half twice": (rotating(lambda x: torch.cat((-x[..., 8:], x[..., 8:]), -1)), args),
        "halves in place": (rotating(lambda x: torch.cat((-x[..., :8], x[..., 8:]), -1)), args),
        "unequal parts": (rotating(lambda x: torch.cat((-x[..., 6:], x[..., :6]), -1)), args),
        "overlapping parts": (rotating(lambda x: torch.cat((-x[..., 4:12], x[..., :8]), -1)), args),
        "of another": (rotating(lambda x: half_rotated(x.flip(-1))), args),
        "minus": (rotating(half_rotated, lambda a, b: torch.add(a, b, alpha=-1)), args),
        "of the number of tokens": (lambda q, k, cos, sin: q * q.shape[2] + half_rotated(q) * sin.unsqueeze(1), args),
        "queries alone": (lambda q, k, cos, sin: q * cos.unsqueeze(1) + half_rotated(q) * sin.unsqueeze(1), args),
        "narrow cos and sin": (
            lambda q, k, cos, sin: torch.cat(
                [x[..., :8] * cos.unsqueeze(1) + x[..., 8:] * sin.unsqueeze(1) for x in (q, k)], 1
            ),
            (q, k, *half),
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(other_rotations()))
@pytest.mark.cases(1)
def test_other_rotations_stay(name: str) -> None:
    run, args = other_rotations()[name]
    out, after = rewritten(run, *args)
    assert after["rotated"] == 0
    assert_alike(out, run(*args))


@pytest.mark.slow
@pytest.mark.thorough
def test_the_quick_way_sees_what_the_compiler_sees() -> None:
    """Else nothing would be found in the cases that must stay."""
    norm, args = Residual(), query_key_cos_sin()
    x = hidden()
    assert rewritten(norm, x, x.flip(-1))[1]["add_rms_norm"] == 1
    assert rewritten(rotate, *args)[1]["rotated"] == rewritten(rotating(half_rotated), *args)[1]["rotated"] == 1


def joined(turn: Run = rotate_in_float32, axis: int = 1) -> Run:
    """Queries and keys rotated side by side, as a draft head does it."""

    def run(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        both = turn(torch.cat((q, k), dim=axis), cos, sin)
        query, key = both.split((q.shape[1], both.shape[1] - q.shape[1]), dim=1)
        return torch.cat((query.relu(), key), 1)

    return run


def heads_cos_sin(dtype: torch.dtype = HALF) -> tuple[torch.Tensor, ...]:
    shapes = ((TOKENS, 4, 16), (TOKENS, 2, 16))
    q, k = (torch.randn(shape, dtype=dtype) for shape in shapes)
    return q, k, torch.randn(TOKENS, 1, 8), torch.randn(TOKENS, 1, 8)


def halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.float().chunk(2, dim=-1)


def other_joined() -> dict[str, tuple[Run, tuple[torch.Tensor, ...]]]:
    """Forms that differ from a draft head's rotation in one place."""
    q, k, cos, sin = args = heads_cos_sin()
    half = [x.to(HALF) for x in (cos, sin)]

    def formula(low: Run, high: Run) -> Run:
        return joined(lambda x, c, s: torch.cat((low(*halves(x), c, s), high(*halves(x), c, s)), -1).to(x.dtype))

    def minus(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return a * c - b * s

    def plus(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return b * c + a * s

    return {
        "float32": (joined(), heads_cos_sin(torch.float32)),
        "cos and sin in half precision": (joined(), (q, k, *half)),
        "cos and sin of every head": (joined(), (q, k, cos.repeat(1, 6, 1), sin.repeat(1, 6, 1))),
        "cos and sin of one token": (joined(), (q, k, cos[:1], sin[:1])),
        "not rounded": (joined(lambda x, c, s: rotate_in_float32(x.float(), c, s)), args),
        "queries alone": (lambda q, k, cos, sin: rotate_in_float32(q, cos, sin), args),
        "other way round": (formula(lambda a, b, c, s: a * c + b * s, lambda a, b, c, s: b * c - a * s), args),
        "first minus": (formula(minus, lambda a, b, c, s: a * c + b * s), args),
        "halves exchanged before": (joined(lambda x, c, s: rotate_in_float32(x.roll(8, -1), c, s)), args),
        "sin for cos": (formula(minus, lambda a, b, c, s: b * s + a * c), args),
        "scaled": (formula(lambda a, b, c, s: torch.sub(a * c, b * s, alpha=2), plus), args),
        "second first": (
            joined(lambda x, c, s: torch.cat((plus(*halves(x), c, s), minus(*halves(x), c, s)), -1).to(HALF)),
            args,
        ),
    }


@pytest.mark.slow
@pytest.mark.thorough
def test_the_rotation_of_a_draft_head_is_one_operator() -> None:
    """Bit by bit what eager code gives: in float32, rounded once."""
    args = heads_cos_sin()
    out, after = rewritten(joined(), *args)
    assert (after["rotated_together"], after["sub"], after["split"], after["cat"]) == (1, 0, 0, 1)
    assert torch.equal(out, joined()(*args))
    out, counted = compiled(joined(), *args)
    assert counted.after["rotated_together"] == 1 and torch.equal(out, joined()(*args))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(other_joined()))
@pytest.mark.cases(1)
def test_other_rotations_of_both_stay(name: str) -> None:
    run, args = other_joined()[name]
    out, after = rewritten(run, *args)
    assert after["rotated_together"] == 0
    assert_alike(out, run(*args))


@pytest.mark.slow
@pytest.mark.parametrize("layers", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.thorough
def test_every_layer_of_a_draft_head_rotates_by_one_operator(layers: int) -> None:
    """Queries and keys reach the attention as the views that eager code has: the compiler adds no copies."""
    head = make_head(eagle3_spec(head_dim=16, num_layers=layers)).to(HALF)
    passes, strides = EaglePasses(head), []

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        strides.append((query.stride(), key.stride(), key.data_ptr() - query.data_ptr()))
        return query.clone()

    args = torch.randn(TOKENS, head.hidden_size, dtype=HALF), torch.randint(5, (TOKENS,)), torch.arange(TOKENS)
    with torch.no_grad(), passes.carrying(attend):
        eager = passes.step(*args)
        strides.clear()
        out, counted = compiled(passes.step, *args)
    assert counted.after["rotated_together"] == layers
    assert counted.before["sub"] == layers and counted.after["sub"] == 0
    tokens = (head.spec.num_heads + head.spec.num_kv_heads) * 16
    assert strides == [((tokens, 16, 1), (tokens, 16, 1), head.spec.num_heads * 16 * 2)] * layers
    assert_alike(out[0], eager[0])


def gated(x: torch.Tensor) -> torch.Tensor:
    """The gated activation over the halves of one matmul's result."""
    gate, up = x.chunk(2, -1)
    return nn.functional.silu(gate) * up


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, TOKENS, 64), (TOKENS, 64)])
@pytest.mark.cases(1)
def test_gated_activations_are_one_operator(shape: tuple[int, ...]) -> None:
    _, after = rewritten(gated, hidden(*shape))
    assert (after["silu_product"], after["exp"], after["mul"]) == (1, 0, 0)
    for run in (gated, lambda x: x[..., 32:] * nn.functional.silu(x[..., :32])):
        x = hidden(*shape)
        out, counted = compiled(run, x)
        assert counted.after["silu_product"] == 1
        assert_alike(out, gated(x))


def other_gates() -> dict[str, tuple[Run, torch.Tensor]]:
    """What must stay the compiler's."""
    silu, split = nn.functional.silu, lambda x: x.chunk(2, -1)
    return {
        "float32": (gated, hidden(dtype=torch.float32)),
        "two sequences": (gated, hidden(2, TOKENS, 64)),
        "gelu": (lambda x: nn.functional.gelu(split(x)[0]) * split(x)[1], hidden()),
        "sigmoid": (lambda x: torch.sigmoid(split(x)[0]) * split(x)[1], hidden()),
        "of another": (lambda x: split(x)[0] / (1 + torch.exp(-split(x)[1])) * split(x)[1], hidden()),
        "a number": (lambda x: silu(x) * 2, hidden()),
        "one row of ups": (lambda x: silu(split(x)[0]) * split(x)[1][:, :1], hidden()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(other_gates()))
@pytest.mark.cases(1)
def test_other_gates_stay(name: str) -> None:
    run, x = other_gates()[name]
    out, after = rewritten(run, x)
    assert after["silu_product"] == 0
    assert_alike(out, run(x))
