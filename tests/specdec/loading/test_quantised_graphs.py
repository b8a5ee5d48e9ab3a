"""Quantised targets with CUDA graphs: compiled as they are, left out of what is done to plain layers, or named."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import backend_of_ours, random_prompts, table_head, wrap
from torch import nn

from attention.hf.absorbed_mla import absorbed_attention
from drafters.mtp.spec import mtp_target
from specdec import SamplingParams, SpecdecWarning, SpeculativeModel
from specdec.compiler.gemm_selection import product_weights
from specdec.compiler.siblings import SiblingLinear, fuse_siblings
from specdec.errors import HeadLoadError, HeadMismatchError, UnsupportedModelError
from specdec.loading.backends import check_backend_fits
from specdec.loading.heads import target_facts
from specdec.wrapped.alterations import Alterations
from specdec.wrapped.probing import probe_target
from tests.quantised import Int8Pair, RoundedByRow, make, own_model, plain_llama
from tests.specdec.execution.test_graphs import FixedPlaceBackend, Replayed, graphs_on_cpu, recorded_on_cpu  # noqa: F401
from tests.specdec.loading.test_graphs import broken

PROMPTS = random_prompts((5, 17))
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def of_pairs(*names: str) -> Any:
    """A model whose projections of these names have weights as torchao's: a tensor of two others."""
    model: Any = plain_llama()
    for name, layer in list(model.named_modules()):
        if name.rpartition(".")[2] in names:
            layer.weight = nn.Parameter(Int8Pair.of(layer.weight), requires_grad=False)
    return model


def own_forward(model: Any) -> Any:
    for layer in model.model.layers:
        rounding = RoundedByRow.forward.__get__(layer.self_attn.q_proj)
        layer.self_attn.q_proj.forward, layer.self_attn.q_proj.by_row = rounding, True
    return model


def fused(model: Any) -> set[str]:
    run = lambda: model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)  # noqa: E731
    alterations = Alterations(model)
    with torch.no_grad():
        before = run().logits
        fuse_siblings(model, run, alterations)
        names = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, SiblingLinear)}
        assert torch.equal(run().logits, before)
    alterations.undo()
    return names


def test_quantised_projections_are_not_fused() -> None:
    whole = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert fused(plain_llama()) == whole
    assert fused(of_pairs("q_proj", "k_proj", "v_proj")) == {"gate_proj", "up_proj"}
    assert fused(of_pairs("up_proj")) == {"q_proj", "k_proj", "v_proj"}
    assert fused(own_forward(plain_llama())) == {"k_proj", "v_proj", "gate_proj", "up_proj"}


def test_matmuls_of_quantised_layers_have_no_algorithm_to_choose() -> None:
    plain = product_weights(plain_llama())
    assert len(product_weights(of_pairs("q_proj", "down_proj"))) == len(plain) - 6


def test_a_quantised_projection_is_not_absorbed() -> None:
    class Attention(nn.Module):
        qk_nope_head_dim, v_head_dim, kv_lora_rank = 4, 4, 8

        def __init__(self) -> None:
            super().__init__()
            self.kv_b_proj = nn.Linear(8, 16, bias=False)

        def expand_kv(self) -> None: ...

    attention: Any = Attention()
    assert absorbed_attention(attention) is not None
    attention.kv_b_proj.forward = RoundedByRow.forward.__get__(attention.kv_b_proj)
    assert absorbed_attention(attention) is None
    attention = Attention()
    attention.kv_b_proj.weight = nn.Parameter(Int8Pair.of(attention.kv_b_proj.weight), requires_grad=False)
    assert absorbed_attention(attention) is None


def test_the_batch_invariant_mode_refuses_quantised_layers() -> None:
    class Invariant:
        batch_invariant = True

    backend: Any = Invariant()
    check_backend_fits(probe_target(plain_llama()), backend)
    with pytest.raises(UnsupportedModelError, match=r"has quantised layers \(Linear\).*not with backend='batch_inv"):
        check_backend_fits(probe_target(of_pairs("up_proj")), backend)


def load(target: Any, head: Any, **options: Any) -> SpeculativeModel:
    with backend_of_ours(FixedPlaceBackend(torch.device("cpu"))):
        wrapped: SpeculativeModel = wrap(target, head, num_speculative_tokens=2, **options)
        return wrapped


def tokens(wrapped: SpeculativeModel) -> list[list[int]]:
    return [c.token_ids for c in wrapped.generate(PROMPTS, SamplingParams(max_new_tokens=16))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchao int8", pytest.param("compressed-tensors int4", marks=pytest.mark.long)])
@pytest.mark.thorough
def test_real_checkpoints_run_from_graphs(
    name: str,
    tmp_path: Path,
    graphs_on_cpu: list[Replayed],  # noqa: F811
) -> None:
    folder = make(name, tmp_path / "target")
    head = table_head(own_model(folder), 0.1, aux_layers=(1, 2, 3))
    with wrap(folder) as plain:
        said = tokens(plain)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*CUDA graphs", SpecdecWarning)
        wrapped = load(folder, head)
    with wrapped:
        assert wrapped.graphs == "on"
        assert tokens(wrapped) == said
        siblings = [m for m in wrapped.hf_model.modules() if isinstance(m, SiblingLinear)]
        assert len(siblings) == (0 if name.startswith("torchao") else 15), "what is decompressed is fused"


@pytest.mark.slow
def test_what_cannot_be_compiled_is_named(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken(monkeypatch, "compile", RuntimeError("a graph break in a kernel"))
    model: Any = plain_llama()
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = RoundedByRow
    words = (
        r"LlamaForCausalLM with quantised layers \(RoundedByRow\) runs without CUDA graphs.*a graph break in a kernel"
    )
    with pytest.warns(SpecdecWarning, match=words):
        wrapped = load(model, table_head(plain_llama(), 0.1, aux_layers=(1, 2, 3)))
    with wrapped:
        assert wrapped.describe()["graphs"]["state"] == "off: RuntimeError: a graph break in a kernel"


def test_heads_share_a_dense_copy_of_a_quantised_output_embedding() -> None:
    model = of_pairs("lm_head")
    for facts in (target_facts(probe_target(model)), mtp_target(model)):
        assert type(facts.lm_head) is torch.Tensor
        assert torch.equal(facts.lm_head, model.lm_head.weight.dequantize())
        assert facts.embedding is model.model.embed_tokens.weight
    model.lm_head.weight = nn.Parameter(torch.ones(64, 64, dtype=torch.int8), requires_grad=False)
    with pytest.raises(HeadLoadError, match=r"output embedding \(lm_head\) is quantised \(Linear\)"):
        target_facts(replace(probe_target(plain_llama()), model=model))
    with pytest.raises(HeadMismatchError, match=r"the target's lm_head is quantised \(Linear\)"):
        mtp_target(model)
