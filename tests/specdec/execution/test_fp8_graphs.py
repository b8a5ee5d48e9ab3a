"""A target in fine-grained FP8 through the graph executor on a CPU (see test_graphs.py): fused, compiled, put back."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import table_head
from torch._inductor import config as inductor

from specdec.compiler.passes import Rewriting
from specdec.compiler.siblings import SiblingFp8Linear
from specdec.requests.sampling import SamplingParams
from specdec.wrapped.quantised_layers import Fp8Linear
from tests.fakes import load_target
from tests.fp8 import DEEPSEEK, LLAMA, gaps, greedy, prompts, reference, write
from tests.specdec.compiler.test_passes import operators
from tests.specdec.execution.test_closed_graphs import state_of
from tests.specdec.execution.test_graphs import Replayed, graphs_on_cpu, recorded_on_cpu, with_graphs  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:.*runs on a CPU")
PROMPTS = prompts((5, 33, 17))
NEW = 12


def graphed(folder: Path, sizes: dict[str, Any], groups: int) -> None:
    """The oracle's tokens with K = 3, from graphs; then the model is closed."""
    oracle, target = reference(folder, sizes), load_target(folder, torch.float64, torch.device("cpu"))
    head: Any = table_head(oracle, aux_layers=(1, 2))
    for name in ("fuse_weight", "qkv", "mix", "table"):
        setattr(head, name, getattr(head, name).double())
    before = state_of(target)
    model = with_graphs(head, target, num_speculative_tokens=3, max_num_seqs=3)
    assert model.engine.executor.report.fused_groups == groups
    assert any(isinstance(m, SiblingFp8Linear) for m in target.modules())
    answers = model.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))
    assert [c.token_ids for c in answers] == [greedy(oracle, prompt, NEW) for prompt in PROMPTS]
    model.close()
    changed = [each for each, old in zip(state_of(target)[1], before[1], strict=True) if each != old]
    assert not changed, "weights are in memory of their own again"
    assert {type(m) for m in target.modules()}.isdisjoint({SiblingFp8Linear, Fp8Linear})


@pytest.mark.slow
@pytest.mark.thorough
def test_rounds_from_graphs(graphs_on_cpu: list[Replayed], tmp_path: Path) -> None:  # noqa: F811
    graphed(write(tmp_path / "target", LLAMA), LLAMA, 2 * 2)
    assert any(graph.replays for graph in graphs_on_cpu)


@pytest.mark.slow
def test_experts_and_latent_attention_from_graphs(graphs_on_cpu: list[Replayed], tmp_path: Path) -> None:  # noqa: F811
    """Fused: q_a and kv_a, which ends inside a block, of both layers; gate and up of the shared expert, whose width
    blocks divide, and not those of the dense layer."""
    graphed(write(tmp_path / "target", DEEPSEEK), DEEPSEEK, 2 + 1)


@pytest.mark.long
def test_compiled_rounds(
    recorded_on_cpu: list[Replayed],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """fullgraph, in half precision: a layer has four matmuls, and of their inputs o's alone is quantised apart."""
    after: list[Counter[str]] = []
    rewrite = Rewriting.__call__

    def counted(self: Rewriting, graph: torch.fx.Graph) -> None:
        rewrite(self, graph)
        after.append(operators(graph))

    monkeypatch.setattr(Rewriting, "__call__", counted)
    folder = write(tmp_path / "target", LLAMA)
    target, oracle = load_target(folder, torch.bfloat16, torch.device("cpu")), reference(folder, LLAMA)
    with inductor.patch(force_disable_caches=True):  # code of an earlier run is not rewritten
        model = with_graphs(None, target, num_speculative_tokens=0, max_num_seqs=2)
    answers = model.generate(PROMPTS[:2], SamplingParams(max_new_tokens=NEW))
    (found,) = after
    own = {"fp8_matmul": 2 * 4, "fp8_quantise": 2, "rms_norm_fp8": 1, "add_rms_norm_fp8": 3, "silu_product_fp8": 2}
    assert {name: count for name, count in found.items() if "fp8" in name} == own
    assert (found["add_rms_norm"], found["few_tokens_linear"], found["mm"]) == (1, 1, 0)
    assert any(graph.replays for graph in recorded_on_cpu)
    for answer in answers:
        assert gaps(oracle, answer).median() == 0 and gaps(oracle, answer).max() < 1
