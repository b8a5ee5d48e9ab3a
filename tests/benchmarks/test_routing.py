"""Counting the experts that a round reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GptOssConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from benchmarks.routing import HeldRoutes, expert_work
from benchmarks.shapes import Pair, random_pair
from specdec.ops.mixtures.choice import CAPTURABLE, capturable_experts, own_form, using_capturable_experts
from specdec.wrapped import quantised_layers
from specdec.wrapped.quantised_layers import Mxfp4Experts

CPU = torch.device("cpu")
LAYERS, PER_TOKEN, EXPERT = 3, 6, 3 * 256 * 128


@pytest.fixture(scope="module")
def pair() -> Pair:
    return random_pair("tiny-deepseek", torch.float32, CPU)


def sequences(count: int, length: int) -> list[list[int]]:
    ids = torch.randint(102_400, (count, length), generator=torch.Generator().manual_seed(0))
    return ids.tolist()


def chosen(pair: Pair, sequence: list[int]) -> list[torch.Tensor]:
    """[T, k] experts a layer, from the routers' own output."""
    found: list[torch.Tensor] = []
    gates: list[Any] = [m for n, m in pair.target.named_modules() if n.endswith("mlp.gate")]
    hooks = [g.register_forward_hook(lambda module, args, out: found.append(out[2])) for g in gates]
    with torch.inference_mode():
        pair.target(input_ids=torch.tensor([sequence]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.slow
def test_one_token_uses_its_own_experts(pair: Pair) -> None:
    work = expert_work(pair.target, sequences(1, 20), 1, 10)
    assert work.distinct == LAYERS * PER_TOKEN and work.layers == LAYERS
    assert work.weights == work.weights_a_token == LAYERS * PER_TOKEN * EXPERT


@pytest.mark.slow
def test_tokens_of_a_round_share_experts(pair: Pair) -> None:
    """Two rows, rounds of 3 positions, the last 6 tokens: two rounds."""
    rows = sequences(2, 20)
    routes = [chosen(pair, row) for row in rows]
    counts = [
        len(torch.cat([r[layer][start : start + 3].flatten() for r in routes]).unique())
        for layer in range(LAYERS)
        for start in (14, 17)
    ]
    assert expert_work(pair.target, rows, 3, 6).distinct == pytest.approx(sum(counts) / 2)
    assert sum(counts) / 2 < LAYERS * PER_TOKEN * 6


@pytest.mark.slow
def test_only_chosen_experts_count_in_the_floor(pair: Pair) -> None:
    rows = sequences(1, 30)
    one, four = (pair.floor_ms(1, k, 20, pair.experts(rows, k, 16)) for k in (0, 3))
    dense = pair.floor_ms(1, 0, 20, tuple(w.scaled(0) for w in pair.experts(rows, 0, 16)))
    experts = 2 * LAYERS * PER_TOKEN * EXPERT / 4.25e12 * 1e3
    assert one - dense == pytest.approx(experts, rel=1e-6)
    assert four > one


@pytest.mark.slow
@pytest.mark.thorough
def test_a_model_without_experts_has_none() -> None:
    assert expert_work(random_pair("tiny", torch.float32, CPU).target, sequences(1, 8), 1, 4).layers == 0


@pytest.fixture
def own_forms() -> Iterator[None]:
    """What holding routes replaces is put back."""
    before = quantised_layers.own_form
    yield
    ALL_EXPERTS_FUNCTIONS.register(CAPTURABLE, capturable_experts)
    quantised_layers.own_form = before


def _keeping(graphs: list[torch.fx.GraphModule]) -> Any:
    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module)
        return module.forward

    return backend


@pytest.mark.usefixtures("own_forms")
def test_held_routes_of_packed_experts() -> None:
    """Compiled, with tables of constant size: equal layers stay equal, and are compiled once. Eager forwards, which
    self-tests compare, keep the router's choice."""
    config = GptOssConfig(hidden_size=32, intermediate_size=32, num_local_experts=4, num_experts_per_tok=2)
    mixture, holder = Mxfp4Experts(config).requires_grad_(False), torch.nn.Module()
    for name, parameter in mixture.named_parameters():
        if not name.endswith("_bias"):
            parameter.random_(*((118, 122) if name.endswith("_scales") else (0, 256)))
    holder.mlp = torch.nn.Module()
    holder.mlp.experts = mixture
    table = HeldRoutes.of(holder, torch.nn.Module(), 8).tables[0]
    hidden, weights, zeros = torch.randn(5, 32), torch.rand(5, 2), torch.zeros(5, 2, dtype=torch.long)
    graphs: list[torch.fx.GraphModule] = []
    backend = _keeping(graphs)
    compiled = torch.compile(mixture, fullgraph=True, dynamic=True, backend=backend)(hidden, zeros, weights)
    (held,) = (n for n in graphs[0].graph.nodes if n.op == "placeholder" and "held_routes" in n.name)
    assert all(isinstance(size, int) for size in held.meta["example_value"].shape)
    assert torch.equal(compiled, mixture(hidden, table[:5], weights))
    assert not torch.equal(compiled, mixture(hidden, zeros, weights))


@pytest.mark.usefixtures("own_forms")
@pytest.mark.thorough
def test_held_routes() -> None:
    """The experts of a token slot are the table's, whatever the router says; and so are the numbers of experts."""
    pair = random_pair("tiny-deepseek", torch.float32, torch.device("cpu"), held_tokens=64)
    assert pair.routes is not None
    mixture, table = next(m for m in pair.target.modules() if hasattr(m, "has_gate")), pair.routes.tables[0]
    hidden, weights = torch.randn(5, 256), torch.rand(5, table.shape[1])
    with using_capturable_experts(pair.target):
        compiled = torch.compile(mixture, fullgraph=True, backend="eager")
        found = compiled(hidden, torch.zeros_like(table[:5]), weights)
        other = compiled(hidden, torch.ones_like(table[:5]), weights)
    assert torch.equal(found, other)
    assert torch.allclose(found, own_form(mixture, hidden, table[:5], weights))
    work = pair.routes.work(7)
    assert work.distinct == sum(len(set(t[:7].flatten().tolist())) for t in pair.routes.tables[: int(work.layers)])
    assert pair.experts([[1] * 20] * 2, 3, 8)[0].distinct == pair.routes.work(8).distinct
