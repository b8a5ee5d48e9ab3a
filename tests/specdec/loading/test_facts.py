"""What was resolved is told: attention kernels, caches, and what capturing the graphs took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fakes import table_head, tiny_llama, wrap
from transformers import GptOssConfig

from specdec.cli.tables import route_rows
from specdec.execution.base import GraphReport
from specdec.loading.facts import facts_of
from specdec.wrapped.quantised_layers import Mxfp4Experts


def loaded() -> Any:
    model = tiny_llama()
    return wrap(model, table_head(model), num_speculative_tokens=2)


def test_attention_and_caches() -> None:
    facts = facts_of(loaded())
    assert facts["attention"] == dict.fromkeys(("target", "head"), "torch reference, cache float32")
    assert (
        facts["kv_cache"]["target"] == f"400 tokens in float32, NHD pages, {400 * 4 * 2 * 2 * 16 * 4 / 2**30:.3g} GiB"
    )
    assert facts["engine"]["num_speculative_tokens"] == 2
    off = "off: backend 'torch' has none"
    assert facts["graphs"] == {"state": off} and ("CUDA graphs", off) in route_rows(facts)
    assert facts["kernels"] == {} and {"self-test", "loading the head", "in all"} <= set(facts["start"])
    assert facts["start"]["in all"] > 0


def test_packed_experts_are_counted_by_weights() -> None:
    """Not by bytes; exponents are none."""
    sizes = {"num_local_experts": 4, "hidden_size": 64, "intermediate_size": 32}
    experts, model = Mxfp4Experts(GptOssConfig(**sizes)).requires_grad_(False), loaded()
    plain = facts_of(model)["parameters"]
    model.hf_model.model.extra = experts
    assert facts_of(model)["parameters"] == plain + 4 * (3 * 64 * 32 + 2 * 32 + 64)


def test_graphs() -> None:
    model = loaded()
    report = GraphReport(12, 8, 20, (8, 4, 2, 1), 31.234, 3 << 29, 7, "9 of 12")
    model.engine.use(SimpleNamespace(report=report, transfers=0))
    model.graphs = "on"
    facts = facts_of(model)
    counts = {"state": "on", "graphs": 12, "sampled_graphs": 8, "segment_graphs": 20, "rows": (8, 4, 2, 1)}
    assert facts["graphs"] == counts | {"seconds": 31.2, "GiB": 1.5, "fused_groups": 7, "products": "9 of 12"}
    made = "12 for 8, 4, 2, 1 rows, 8 more for sampled ones, 20 by segments"
    assert ("CUDA graphs", f"{made}, captured in 31.2 s, 1.5 GiB") in route_rows(facts)
    assert ("matmul algorithms", "9 of 12") in route_rows(facts)
