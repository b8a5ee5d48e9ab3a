"""Tiny random models that read images or sound too, around a language model, and what transformers says of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from fakes import TINY, VOCAB, enlarge
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForMultimodalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from tests.hybrids import OPTIONS as HYBRIDS

IMAGE, VIDEO = VOCAB - 1, VOCAB - 2
"""Token ids that stand for an image and for a video (or sound) in a prompt."""
TEXT: dict[str, Any] = {**TINY, "max_position_embeddings": 256, "tie_word_embeddings": False}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_WINDOW: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 32}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_MROPE: dict[str, Any] = {"rope_parameters": _SECTIONS}
_HALF_MROPE: dict[str, Any] = {
    "rope_parameters": {**_SECTIONS, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
}
_MLA: dict[str, Any] = {
    **_MOE,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_shared_experts": 1,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 4,
    "num_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "out_hidden_size": 32,
}
WRAPPERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("qwen2_vl_text", {**_MROPE, "hidden_size": 64}, {"hidden_size": 64}),
    "qwen2_5_vl": ("qwen2_5_vl_text", {**_MROPE, "hidden_size": 64}, {"out_hidden_size": 64}),
    "qwen3_vl": ("qwen3_vl_text", _MROPE, {"deepstack_visual_indexes": [0]}),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", {**_MROPE, **_MOE}, {"deepstack_visual_indexes": [0]}),
    "qwen3_5": ("qwen3_5_text", HYBRIDS["qwen3_5_text"], {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", HYBRIDS["qwen3_5_moe_text"], {}),
    "mistral3": ("mistral", {}, {}),
    "llava": ("llama", {}, {}),
    "llava_next": ("mistral", {"sliding_window": 32}, {}),
    "llava_onevision": ("qwen2", {}, {}),
    "vipllava": ("llama", {}, {}),
    "internvl": ("qwen3", {}, {"image_size": [16, 16], "patch_size": [8, 8]}),
    "glm4v": ("glm4v_text", _HALF_MROPE, {}),
    "glm4v_moe": ("glm4v_moe_text", {**_HALF_MROPE, **_MOE}, {}),
    "paligemma": ("gemma", {}, {"projection_dim": 32}),
    "smolvlm": ("llama", {}, {}),
    "idefics2": ("mistral", {}, {}),
    "idefics3": ("llama", {}, {}),
    "gemma3": ("gemma3_text", _WINDOW, {}),
    "aya_vision": ("cohere2", _WINDOW, {}),
    "cohere2_vision": ("cohere2", _WINDOW, {}),
    "aria": ("aria_text", {"moe_num_experts": 4, "moe_topk": 2}, {}),
    "kimi_k25": ("deepseek_v3", _MLA, {}),
    "voxtral": ("llama", {}, {"num_mel_bins": 8, "max_source_positions": 8}),
    "lfm2_vl": ("lfm2", HYBRIDS["lfm2"], {}),
}
"""Type of the wrapper -> type of its text configuration, fields beside `TEXT`, fields beside `TOWER`."""
TYPES = tuple(name for name in WRAPPERS if name in CONFIG_MAPPING and name != "paligemma")
"""Those of them that the installed transformers has and that are served: PaliGemma's prompts are read both ways."""


def tiny_config(name: str, **changes: Any) -> Any:
    """The configuration of a tiny wrapper; `changes`: of its text configuration."""
    kind, text, tower = WRAPPERS[name]
    plain: Any = AutoConfig.for_model(name)
    part = "vision_config" if hasattr(plain, "vision_config") else "audio_config"
    config = type(plain)(
        text_config={**TEXT, **text, **changes, "model_type": kind},
        **{part: {**TOWER, **tower, "model_type": getattr(plain, part).model_type}},
        tie_word_embeddings=False,
    )
    for field in vars(config):
        if field in ("image_token_id", "image_token_index"):
            setattr(config, field, IMAGE)
        elif field in ("video_token_id", "video_token_index", "audio_token_id"):
            setattr(config, field, VIDEO)
    return config


def tiny_wrapper(config: PreTrainedConfig) -> PreTrainedModel:
    """A random model of a configuration."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForMultimodalLM.from_config(config, attn_implementation="eager").eval()
    enlarge(model.requires_grad_(False))
    model.generation_config = GenerationConfig()
    return model


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    """The random model of a type; never changed."""
    return tiny_wrapper(tiny_config(name))


def own_text(model: PreTrainedModel, prompt: list[int], new: int) -> list[int]:
    """Prompt and `new` tokens by the wrapper's own greedy `generate`, with its own cache."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=new, do_sample=False, attention_mask=torch.ones_like(ids))
    return list(out[0].tolist())


def write(name: str, folder: Path) -> PreTrainedModel:
    """Save the random model of a type; the model."""
    model = model_of(name)
    model.save_pretrained(folder)
    return model
