"""Absorbed MLA gives the logits of transformers' expanded forward, and leaves the model as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AXK1Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeLiteConfig,
    MiniCPM3Config,
    PreTrainedConfig,
    YoutuConfig,
)

from attention.backends.reference import TorchBackend
from attention.batch.host import rows_batch
from attention.batch.metadata import single_batch_arena, stage
from attention.cache.kv_cache import CacheGroup, allocate, bytes_per_token
from attention.hf.absorbed_mla import AbsorbedAttention, absorbed_attention, unexpanded
from attention.hf.patches import attention_implementation, borrowed
from attention.hf.probe import probe
from attention.runner import GroupRunner
from attention.spec import AttentionSpec
from specdec.selftest.selftest import self_test
from specdec.wrapped.probing import probe_target
from specdec.wrapped.target import Target

CPU = torch.device("cpu")
LATENT, ROPE, NOPE, VALUE = 48, 8, 12, 20
COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "kv_lora_rank": LATENT,
    "q_lora_rank": 24,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
YARN["original_max_position_embeddings"] = 32
MINICPM3_SCALES: dict[str, Any] = {"scale_emb": 1, "scale_depth": 1.4, "dim_model_base": 32}

CONFIGS: dict[str, PreTrainedConfig] = {
    "deepseek_v2": DeepseekV2Config(**COMMON, **EXPERTS, first_k_dense_replace=1),
    "deepseek_v3": DeepseekV3Config(**COMMON, **EXPERTS, first_k_dense_replace=1),
    "deepseek_v3_yarn": DeepseekV3Config(**COMMON, **EXPERTS, first_k_dense_replace=1, rope_parameters=YARN),
    "deepseek_v3_halves": DeepseekV3Config(**COMMON, **EXPERTS, first_k_dense_replace=3, rope_interleave=False),
    "deepseek_v3_plain_q": DeepseekV3Config(**{**COMMON, "q_lora_rank": None}, **EXPERTS, first_k_dense_replace=3),
    "glm4_moe_lite": Glm4MoeLiteConfig(**COMMON, **EXPERTS),
    "minicpm3": MiniCPM3Config(**COMMON, **MINICPM3_SCALES),
    "youtu": YoutuConfig(**COMMON),
    "axk1": AXK1Config(**COMMON, **EXPERTS),
}


def model_of(config: PreTrainedConfig) -> Any:
    """A model with large random weights (std 1.5/sqrt(fan_in)), so that a wrong attention shows in the logits."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
    return model


def target_of(model: Any, page_size: int = 4) -> Target:
    probed = probe_target(model)
    group = CacheGroup("target", tuple(c.attention_spec for c in probed.calls), 40, page_size)
    return Target(probed, GroupRunner(TorchBackend(CPU), group, torch.float32, CPU), (), 64)


def paged_logits(target: Target, rows: list[torch.Tensor], chunk: int) -> list[torch.Tensor]:
    """Logits [len, V] of each row, read in ragged chunks over scrambled pages."""
    table = np.random.default_rng(1).permutation(np.arange(1, 40))[:30].reshape(3, 10).astype(np.int32)
    done = np.zeros(len(rows), np.int64)
    out: list[list[torch.Tensor]] = [[] for _ in rows]
    lens = np.array([len(r) for r in rows])
    while (done < lens).any():
        stop = np.minimum(done + chunk + np.arange(len(rows)), lens)
        batch = rows_batch(np.concatenate([[0], np.cumsum(stop - done)]), done, table, 4)
        arena, bucket = single_batch_arena(batch.num_reqs, batch.num_tokens, table.shape[1], CPU)
        planned = target.runner.plan(stage(batch, arena, bucket))
        flat = torch.cat([r[a:b] for r, a, b in zip(rows, done, stop, strict=True)])
        logits = target.forward(flat, planned, torch.arange(len(flat))).logits
        for place, part in zip(out, logits.split((stop - done).tolist()), strict=True):
            place.append(part)
        done = stop
    return [torch.cat(parts) for parts in out]


@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_absorbed_logits_equal_the_expanded_forward(name: str) -> None:
    """Prompts of 19, 5 and 31 tokens, in chunks of 4 to 6 tokens a row, over pages of 4."""
    model = model_of(CONFIGS[name])
    target = target_of(model)
    assert all(k.value_in_key and k.head_dim_k == LATENT + ROPE for k in target.runner.group.attention_specs)
    rows = [torch.randint(64, (n,), generator=torch.Generator().manual_seed(n)) for n in (19, 5, 31)]
    ours = paged_logits(target, rows, chunk=4)
    with attention_implementation((model.config,), "eager"):
        own = [model(input_ids=row[None], use_cache=False).logits[0] for row in rows]
    assert max(float((a - b).abs().max()) for a, b in zip(ours, own, strict=True)) <= 1e-4
    assert float(torch.cat(own).std()) > 0.5
    assert self_test(target) < 1e-5


@torch.inference_mode()
def test_a_wrong_projection_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: with the heads' value projections in reverse order the logits are far off."""
    right = AbsorbedAttention.project_output
    monkeypatch.setattr(AbsorbedAttention, "project_output", lambda self, x: right(self, x.flip(1)))
    model = model_of(CONFIGS["deepseek_v3"])
    row = torch.randint(64, (12,), generator=torch.Generator().manual_seed(0))
    rows = [row, row[:5], row[:9]]
    ours = paged_logits(target_of(model), rows, chunk=4)
    assert float((ours[0] - model(input_ids=row[None], use_cache=False).logits[0]).abs().max()) > 0.1


def test_the_models_own_generate_is_untouched() -> None:
    model = model_of(CONFIGS["deepseek_v3"])
    ids = torch.arange(7)[None]
    before = model.generate(ids, max_new_tokens=6, do_sample=False)
    target = target_of(model)
    with torch.inference_mode():
        paged_logits(target, [ids[0], ids[0], ids[0]], chunk=3)
    assert all("expand_kv" not in vars(m) for m in model.modules())
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), before)


def test_expand_kv_comes_back_after_an_error() -> None:
    calls = probe(model_of(CONFIGS["youtu"])).calls
    layers = [c.latent for c in calls if c.latent is not None]
    with pytest.raises(RuntimeError, match="inside"), borrowed(unexpanded(layers)):
        assert "expand_kv" in vars(layers[0].module)
        raise RuntimeError("inside")
    assert "expand_kv" not in vars(layers[0].module)


def test_the_cache_keeps_one_latent_a_token() -> None:
    key = AttentionSpec(4, 1, 576, 512, scale=0.07, value_in_key=True)
    (layer,) = allocate(CacheGroup("g", (key,), 3, 4), torch.float32, CPU)
    assert layer.values.data_ptr() == layer.keys.data_ptr()
    assert layer.keys.shape == (3, 4, 1, 576)
    assert bytes_per_token((key,), torch.float32) == 576 * 4


def test_only_plain_projections_are_absorbed() -> None:
    module = model_of(CONFIGS["deepseek_v3"]).model.layers[0].self_attn
    assert absorbed_attention(module) is not None
    assert absorbed_attention(nn.Linear(2, 2)) is None
    module.kv_b_proj = nn.Linear(LATENT, 4 * (NOPE + VALUE), bias=True)
    assert absorbed_attention(module) is None
