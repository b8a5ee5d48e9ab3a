"""Tiny targets of every architecture that has multi-token-prediction modules, and their checkpoints' real names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import TINY, VOCAB, enlarge
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from tests.hybrids import tiny_config

H, LAYERS, HEADS, INTER = (
    TINY[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
)
KV_HEADS, D = TINY["num_key_value_heads"], TINY["head_dim"]
EXPERTS, EXPERT_SIZE = 4, 24
Q_LORA, LATENT, NOPE, ROPE, VALUE = 24, 40, 12, 8, 20
Shapes = dict[str, tuple[int, ...]]
GQA: dict[str, Any] = {"num_key_value_heads": KV_HEADS, "head_dim": D}
COMMON: dict[str, Any] = {n: value for n, value in TINY.items() if n not in GQA} | {"tie_word_embeddings": False}
MOE: dict[str, Any] = {"n_routed_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_SIZE}
GROUPS: dict[str, Any] = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}


def _norms(prefix: str) -> Shapes:
    return {f"{prefix}{n}.weight": (H,) for n in ("input_layernorm", "post_attention_layernorm")}


def _mlp(prefix: str, width: int) -> Shapes:
    up: Shapes = {f"{prefix}.{n}_proj.weight": (width, H) for n in ("gate", "up")}
    return up | {f"{prefix}.down_proj.weight": (H, width)}


def _experts(prefix: str) -> Shapes:
    return {k: v for j in range(EXPERTS) for k, v in _mlp(f"{prefix}mlp.experts.{j}", EXPERT_SIZE).items()}


def _gqa(prefix: str, bias: bool, gated: bool = False) -> Shapes:
    widths = {"q": HEADS * D * (2 if gated else 1), "k": KV_HEADS * D, "v": KV_HEADS * D}
    shapes: Shapes = {f"{prefix}self_attn.{n}_proj.weight": (w, H) for n, w in widths.items()}
    shapes |= {f"{prefix}self_attn.{n}_proj.bias": (w,) for n, w in widths.items()} if bias else {}
    return shapes | {f"{prefix}self_attn.o_proj.weight": (H, HEADS * D)}


def deepseek(k: int = 0) -> Shapes:
    """`model.layers.{N+k}.*` of DeepSeek-V3."""
    p = f"model.layers.{LAYERS + k}."
    attention = {
        "q_a_proj": (Q_LORA, H),
        "q_b_proj": (HEADS * (NOPE + ROPE), Q_LORA),
        "kv_a_proj_with_mqa": (LATENT + ROPE, H),
        "kv_b_proj": (HEADS * (NOPE + VALUE), LATENT),
        "o_proj": (H, HEADS * VALUE),
    }
    shapes: Shapes = {f"{p}self_attn.{n}.weight": s for n, s in attention.items()}
    shapes |= {f"{p}self_attn.q_a_layernorm.weight": (Q_LORA,), f"{p}self_attn.kv_a_layernorm.weight": (LATENT,)}
    return shapes | _norms(p) | _experts(p) | _moe_layer(p)


def _moe_layer(p: str) -> Shapes:
    """What DeepSeek's and GLM's modules have beside the attention and the experts."""
    return {
        f"{p}embed_tokens.weight": (VOCAB, H),
        f"{p}enorm.weight": (H,),
        f"{p}hnorm.weight": (H,),
        f"{p}eh_proj.weight": (H, 2 * H),
        f"{p}mlp.gate.weight": (EXPERTS, H),
        f"{p}mlp.gate.e_score_correction_bias": (EXPERTS,),
        **_mlp(f"{p}mlp.shared_experts", EXPERT_SIZE),
        f"{p}shared_head.norm.weight": (H,),
        f"{p}shared_head.head.weight": (VOCAB, H),
    }


def glm(k: int = 0) -> Shapes:
    """`model.layers.{N+k}.*` of GLM-4.5."""
    p = f"model.layers.{LAYERS + k}."
    return _gqa(p, bias=True) | _norms(p) | _experts(p) | _moe_layer(p)


def mimo(k: int = 0) -> Shapes:
    """`model.mtp_layers.{k}.*` of MiMo-7B."""
    p = f"model.mtp_layers.{k}."
    extra: Shapes = {f"{p}{n}_layernorm.weight": (H,) for n in ("token", "hidden", "final")}
    return _gqa(p, bias=True) | _norms(p) | _mlp(f"{p}mlp", INTER) | extra | {f"{p}input_proj.weight": (H, 2 * H)}


def ernie(k: int = 0) -> Shapes:
    """`model.mtp_*.{k}.*` of Ernie-4.5."""
    p = f"model.mtp_block.{k}."
    extra: Shapes = {f"model.mtp_{n}_norm.{k}.weight": (H,) for n in ("emb", "hidden")}
    extra |= {f"model.mtp_linear_proj.{k}.weight": (H, 2 * H)}
    return _gqa(p, bias=False) | _norms(p) | _mlp(f"{p}mlp", INTER) | extra


def qwen(k: int = 0) -> Shapes:
    """`mtp.*` of Qwen3-Next and of Qwen3.5's mixtures of experts."""
    p = "mtp.layers.0."
    shapes = _qwen_module() | {f"{p}mlp.gate.weight": (EXPERTS, H)} | _experts(p)
    return shapes | _mlp(f"{p}mlp.shared_expert", EXPERT_SIZE) | {f"{p}mlp.shared_expert_gate.weight": (1, H)}


def qwen_dense(k: int = 0) -> Shapes:
    """`mtp.*` of the dense Qwen3.5."""
    return _qwen_module() | _mlp("mtp.layers.0.mlp", INTER)


def _qwen_module() -> Shapes:
    """All but the feed-forward layer."""
    p = "mtp.layers.0."
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    shapes: Shapes = {f"mtp.{n}.weight": (H,) for n in names}
    shapes |= {"mtp.fc.weight": (H, 2 * H)}
    shapes |= {f"{p}self_attn.{n}_norm.weight": (D,) for n in "qk"}
    return shapes | _gqa(p, bias=False, gated=True) | _norms(p)


def nemotron(k: int = 0) -> Shapes:
    """`mtp.layers.{2k}.*` and `{2k+1}.*` of Nemotron-H: a block of attention, then one of experts."""
    a, m = (f"mtp.layers.{2 * k + block}." for block in (0, 1))
    widths = {"q": HEADS * D, "k": KV_HEADS * D, "v": KV_HEADS * D}
    shapes: Shapes = {f"{a}mixer.{n}_proj.weight": (w, H) for n, w in widths.items()}
    shapes |= {f"{a}mixer.o_proj.weight": (H, HEADS * D), f"{a}eh_proj.weight": (H, 2 * H)}
    shapes |= dict.fromkeys((f"{a}enorm.weight", f"{a}hnorm.weight", f"{a}norm.weight", f"{m}norm.weight"), (H,))
    shapes |= {f"{m}final_layernorm.weight": (H,), f"{m}mixer.gate.weight": (EXPERTS, H)}
    shapes |= {f"{m}mixer.gate.e_score_correction_bias": (EXPERTS,)}
    mlps = ("shared_experts", *(f"experts.{j}" for j in range(EXPERTS)))
    shapes |= {f"{m}mixer.{mlp}.up_proj.weight": (EXPERT_SIZE, H) for mlp in mlps}
    return shapes | {f"{m}mixer.{mlp}.down_proj.weight": (H, EXPERT_SIZE) for mlp in mlps}


@dataclass(frozen=True)
class Case:
    """One architecture: its target's configuration and the names and shapes of a module."""

    config: PreTrainedConfig
    shapes: Callable[[int], Shapes]


MLA: dict[str, Any] = {
    "num_key_value_heads": HEADS,
    "q_lora_rank": Q_LORA,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": EXPERT_SIZE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT_SIZE,
}
ERNIE_MOE: dict[str, Any] = {"moe_num_experts": EXPERTS, "moe_k": 2, "moe_intermediate_size": EXPERT_SIZE}
NEMOTRON: dict[str, Any] = {
    "num_nextn_predict_layers": 1,
    "moe_intermediate_size": EXPERT_SIZE,
    "moe_shared_expert_intermediate_size": EXPERT_SIZE,
}
CASES = {
    "deepseek_v3": Case(DeepseekV3Config(**COMMON, **MOE, **GROUPS, **MLA), deepseek),
    "glm4_moe": Case(Glm4MoeConfig(**COMMON, **GQA, **MOE, **GROUPS, attention_bias=True), glm),
    "mimo": Case(Qwen2Config(**COMMON, **GQA), mimo),
    "ernie": Case(Ernie4_5_MoeConfig(**COMMON, **GQA, **ERNIE_MOE), ernie),
    "qwen3_next": Case(Qwen3NextConfig(**COMMON, **GQA, **LINEAR), qwen),
    "qwen3_5": Case(Qwen3_5TextConfig(**COMMON, **GQA, **LINEAR), qwen_dense),
    "qwen3_5_moe": Case(Qwen3_5MoeTextConfig(**COMMON, **GQA, **LINEAR), qwen),
    "nemotron_h": Case(tiny_config("nemotron_h", **NEMOTRON), nemotron),
}


@dataclass(frozen=True)
class Tiny:
    """A tiny target with random weights, and tensors of its modules under their real names."""

    name: str
    model: Any
    tensors: dict[str, torch.Tensor]

    def write(
        self,
        folder: Path,
        changes: Mapping[str, torch.Tensor | None] | None = None,
        shards: int = 1,
        settings: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write target and modules as one file or as an index; `changes` replaces or (None) drops tensors."""
        plain = self.model.state_dict() | self.tensors | dict(changes or {})
        stored = {name: t.detach().clone() for name, t in plain.items() if t is not None}
        folder.mkdir(parents=True, exist_ok=True)
        config = self.model.config.to_dict() | dict(settings or {})
        (folder / "config.json").write_text(json.dumps(config, default=str))
        if shards == 1:
            save_file(stored, folder / "model.safetensors")
            return folder
        where = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(sorted(stored))}
        for file in set(where.values()):
            save_file({n: t for n, t in stored.items() if where[n] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        return folder


def tiny(name: str, modules: int = 1, context: float = 1.0) -> Tiny:
    """Build a case. `context` weighs what the layers add to the last token's embedding."""
    case = CASES[name]
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(case.config).eval()
    enlarge(model)
    _heed_states(model)
    generator = torch.Generator().manual_seed(1)
    shapes = {k: v for m in range(modules) for k, v in case.shapes(m).items()}
    centre = 0 if name.startswith("qwen3") else 1  # Qwen's norms multiply by 1 + weight
    tensors = {n: _random(n, s, generator, centre) for n, s in sorted(shapes.items())}
    shared = {"embed_tokens.weight": model.get_input_embeddings(), "shared_head.head.weight": model.lm_head}
    for ending, module in shared.items():
        tensors |= {n: module.weight.detach().clone() for n in tensors if n.endswith(ending)}
    for tensor_name, tensor in [*model.named_parameters(), *tensors.items()]:
        if any(name in tensor_name for name in ("o_proj", "out_proj", "down_proj")):
            tensor.data.mul_(context)
    return Tiny(name, model, tensors)


def _heed_states(model: torch.nn.Module) -> None:
    """Mamba2 layers whose outputs come from the tokens before more than from the token itself: long steps, little D."""
    for name, tensor in model.named_parameters():
        if name.endswith("mixer.D"):
            tensor.data.mul_(0.1)
        elif name.endswith(("mixer.dt_bias", "mixer.A_log")):
            tensor.data.fill_(2 if "dt_bias" in name else -1)


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator, centre: int) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return noise * 1.5 / shape[-1] ** 0.5
    return 0.2 * noise + (0 if "bias" in name else centre)


@pytest.fixture
def tiny_case() -> Callable[..., Tiny]:
    """`tiny`, as a fixture of tests/drafters."""
    return tiny
