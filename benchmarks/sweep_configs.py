"""Which models the sweep builds, and how their configurations are made tiny.

A model type's own configuration class is shrunk by the names of its fields. Every length from which a model changes its
behaviour (a window, a chunk, a top-k of keys, the length its rotary embedding was trained for) becomes `THRESHOLD`:
longer than the rows that a self-test might read, shorter than the sweep's prompts, as in real checkpoints.

Model types with a language model inside, beside what reads images or sound, are too different for that:
`specdec.selftest.shrinking`, which makes the miniature that every load is tested by, makes them small, with all
thresholds low.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from specdec.selftest.shrinking import miniature, thresholds

THRESHOLD = 32
VOCAB = 160
WIDTH = 64
LAYERS = 4
HEADS = 4
EXPERTS = 8
MOST_POSITIONS = 256


_MODAL_TOKENS = ("image_token_id", "video_token_id", "audio_token_id", "vision_start_token_id", "audio_start_token_id")


def _same(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


SMALL: dict[str, Any] = {
    **_same(VOCAB, "vocab_size vocab_size_per_layer_input decoder_vocab_size unpadded_vocab_size"),
    **_same(WIDTH, "hidden_size d_model n_embd dim_model emb_dim embedding_size embedding_dim word_embed_proj_dim"),
    **_same(
        WIDTH, "input_embedding_size output_embedding_size attention_hidden_size lru_width out_hidden_size output_dim"
    ),
    **_same(LAYERS, "num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers num_decoder_layers"),
    **_same(LAYERS, "encoder_layers num_encoder_layers"),
    **_same(2, "depth"),
    **_same(HEADS, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"),
    **_same(HEADS, "encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads"),
    **_same(HEADS, "swa_num_attention_heads num_query_groups"),
    **_same(2, "num_key_value_heads num_kv_heads swa_num_key_value_heads num_global_key_value_heads"),
    **_same(16, "head_dim dim_head d_head attention_head_size kv_channels swa_head_dim global_head_dim"),
    **_same(
        96, "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner dim_ff dff d_inner feed_forward_size"
    ),
    **_same(96, "ffn_hidden_size intermediate_size_mlp dense_intermediate_size shared_intermediate_size"),
    **_same(48, "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
    **_same(48, "shared_experts_intermediate_size expert_ffn_hidden_size"),
    **_same(EXPERTS, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    **_same(2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    **_same(2, "n_group num_expert_group sliding_window_pattern _sliding_window_pattern global_attn_every_n_layers"),
    **_same(1, "topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace"),
    **_same(1, "num_dense_layers moe_layer_start_index"),
    **_same(0, "num_nextn_predict_layers num_kv_shared_layers"),
    **_same(LAYERS - 1, "moe_layer_end_index"),
    **_same(24, "q_lora_rank qk_head_dim"),
    **_same(32, "kv_lora_rank"),
    **_same(16, "qk_nope_head_dim v_head_dim index_head_dim hidden_size_per_layer_input laurel_rank o_lora_rank"),
    **_same(8, "qk_rope_head_dim rotary_dim mamba_d_state mamba_d_head mamba_head_dim mamba_headdim ssm_state_size"),
    **_same(8, "state_size time_step_rank linear_key_head_dim linear_value_head_dim linear_head_dim d_rel"),
    **_same(8, "mamba_dt_rank router_hidden_size adapter_rank type_vocab_size pronunciation_embed_dim shape_embed_dim"),
    **_same(16, "pronunciation_vocab_size shape_vocab_size"),
    **_same(2, "max_window_layers index_n_heads linear_num_key_heads linear_num_value_heads linear_num_heads o_groups"),
    **_same(16, "mamba_n_heads mamba_num_heads n_mamba_heads"),
    **_same(
        MOST_POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length"
    ),
    **_same(MOST_POSITIONS, "model_max_length max_source_positions"),
    **_same(THRESHOLD, "sliding_window sliding_window_size attention_window_size window_size local_attention"),
    **_same(THRESHOLD, "attention_chunk_size floor_scale index_topk original_max_position_embeddings keep_window_size"),
    **_same(THRESHOLD, "log_scaling_n_floor rel_extent index_block_size chunk_size mamba_chunk_size block_size"),
    **_same(THRESHOLD, "local_attn_chunk_length lsh_attn_chunk_length mem_len max_inference_chunksize"),
    **_same(0, "bos_token_id cls_token_id decoder_start_token_id forced_bos_token_id"),
    **_same(1, "eos_token_id sep_token_id forced_eos_token_id"),
    **_same(2, "pad_token_id mask_token_id"),
    **{name: number for number, name in enumerate(_MODAL_TOKENS, start=3)},
    **_same(0.0, "layerdrop decoder_layerdrop encoder_layerdrop"),
    "is_decoder": True,
    "use_cache": True,
    "query_pre_attn_scalar": 16,
}
"""What a field of this name becomes where a configuration has it."""

_LATENT = {"num_key_value_heads": HEADS}
_ENCODERS_ONLY = ("vision_config", "audio_config", "vq_config", "image_config", "speech_config")

_MODAL_IDS = dict(zip(_MODAL_TOKENS, range(3, 8), strict=True))
_MROPE = {
    "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
}
_QSA = {
    "indexer_budget": THRESHOLD,
    "indexer_compress_ratio": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
}
_PAIRS = ["conv", "full_attention"] * 2
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_NO_LEAST_STEP = {"time_step_min": 1e-6}
"""transformers clamps Mamba2's step in a prefill only, so by default its `generate` differs from its own forward."""
_PURE = ("mamba", "mamba2", "falcon_mamba")
"""Types without attention, whose configurations have no longest sequence."""

HINTS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _LINEAR,
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": WIDTH},
    },
    "dots3_note_text": {
        "swa_kv_lora_rank": 32,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
        "swa_q_lora_rank": 24,
    },
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma4_unified": {"vision_config": {"mm_embed_dim": WIDTH}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": _LINEAR,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _LINEAR | _LATENT,
    "lfm2": {"layer_types": _PAIRS},
    "lfm2_moe": {"layer_types": _PAIRS},
    "lfm3": {"layer_types": _PAIRS},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 16, "head_dim": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention"],
        **_NO_LEAST_STEP,
    },
    "moshi": {"audio_vocab_size": VOCAB},
    "qwen4_exp": {"text_config": _QSA},
    "qwen4_exp_text": _QSA,
    "reformer": {"axial_pos_embds": False},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": 2 * WIDTH // HEADS,
        "num_key_value_heads": HEADS,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "num_mem_blocks": 2,
        "attention_hidden_size": 2 * WIDTH,
        "num_key_value_heads": HEADS,
        **_NO_LEAST_STEP,
    },
    "zaya": {"num_experts_per_tok": 1},
    "Qwen2_5OmniThinkerForConditionalGeneration": {**_MROPE, **_MODAL_IDS},
    "Qwen3OmniMoeThinkerForConditionalGeneration": {**_MROPE, **_MODAL_IDS},
    "Qwen2_5_VLForConditionalGeneration": {**_MROPE, **_MODAL_IDS},
    "Qwen3VLForConditionalGeneration": {**_MROPE, **_MODAL_IDS},
}
"""Fields of model types that names alone do not make small, or not valid."""


_LONGEST = 10**9
_QWEN: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}
_GLM = _QWEN | {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
_ROPE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glm4v", "glm46v", "glm_ocr", "glmga", "glm4v_moe"), _GLM),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "paddleocr_vl"), _QWEN),
}
"""Rotary parameters of published configurations where those of the class name no sections."""


@dataclass(frozen=True)
class Case:
    """One model of the sweep.

    Attributes:
        name: the model type, with a word for its option where it has one.
        model_type: of the mapping; None for a class by name.
        class_name: of transformers; default AutoModelForCausalLM's choice.
        wrapper: a model type outside the mapping with a language model inside, see `wrapper_types`; it is saved, and
            loaded from its folder.
        options: fields of the (text) configuration on top of the shrunk ones.
        load: arguments of SpeculativeModel.from_pretrained.
    """

    name: str
    model_type: str | None = None
    class_name: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    load: Mapping[str, Any] = field(default_factory=dict)
    wrapper: str | None = None


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    long = {"original_max_position_embeddings": THRESHOLD} if kind != "dynamic" else {}
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 8.0, **long, **more}}


_FACTORS = [1.0 + 0.1 * i for i in range(8)]
_LONGROPE = _rope("longrope", short_factor=_FACTORS, long_factor=[2 * f for f in _FACTORS])
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2}

_VARIANTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "yarn", _rope("yarn")),
    ("llama", "llama3", _rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    ("llama", "longrope", _LONGROPE),
    ("phi3", "longrope", _LONGROPE | {"original_max_position_embeddings": THRESHOLD}),
    ("llama", "dynamic", _rope("dynamic") | {"max_position_embeddings": THRESHOLD}),
    ("llama", "linear", _rope("linear")),
    ("mistral", "no window", {"sliding_window": None}),
    ("qwen2", "sliding", {"use_sliding_window": True, "sliding_window": THRESHOLD, "max_window_layers": 2}),
    ("qwen3", "sliding", {"use_sliding_window": True, "sliding_window": THRESHOLD, "max_window_layers": 2}),
    ("qwen2_moe", "sliding", {"use_sliding_window": True, "sliding_window": THRESHOLD, "max_window_layers": 2}),
    ("qwen3_moe", "sliding", {"use_sliding_window": True, "sliding_window": THRESHOLD, "max_window_layers": 2}),
    ("dots1", "sliding", dict(_SLIDING)),
    ("smollm3", "sliding", {"use_sliding_window": True, "sliding_window": THRESHOLD, **_SLIDING}),
    ("phimoe", "no window", {"sliding_window": None}),
    ("olmoe", "sliding_window key", {"sliding_window": THRESHOLD}),
    ("olmoe", "clip_qkv", {"clip_qkv": 0.5}),
    ("deepseek_v2", "no q_lora", {"q_lora_rank": None}),
    ("deepseek_v3", "no q_lora", {"q_lora_rank": None}),
    ("deepseek_v3", "no interleave", {"rope_interleave": False}),
    ("deepseek_v3", "yarn", _rope("yarn", mscale=1.0, mscale_all_dim=1.0)),
    ("gemma4_text", "shared KV", {"num_kv_shared_layers": 2, **_SLIDING}),
    ("gemma3n_text", "shared KV", {"num_kv_shared_layers": 2, **_SLIDING}),
    ("gemma4_text", "k is v", {"attention_k_eq_v": True}),
    ("granitemoehybrid", "attention only", {"layer_types": ["attention"] * LAYERS}),
    ("granitemoehybrid", "full attention only", {"layer_types": ["full_attention"] * LAYERS}),
    ("lfm2", "attention only", {"layer_types": ["full_attention"] * LAYERS}),
    ("minimax_m3_vl_text", "dense", {"layer_types": ["full_attention"] * LAYERS}),
    ("ministral3", "scaled", {}),
    ("olmo", "clip_qkv", {"clip_qkv": 0.5}),
    ("gpt2", "inverse layer scaling", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt_bigcode", "MHA", {"multi_query": False}),
    ("llama", "biases", {"attention_bias": True, "mlp_bias": True}),
)

_CLASSES = (
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen3OmniMoeThinkerForConditionalGeneration",
    "VideoLlama3ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
)


def wrapper_types() -> tuple[str, ...]:
    """Model types that transformers loads as text from images or sound, and not as causal language models."""
    known = dict.fromkeys([*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES])
    return tuple(name for name in known if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_wrapper(name: str) -> Any:
    """The shrunk configuration of such a type."""
    config = AutoConfig.for_model(name)
    if name in _ROPE:
        config.get_text_config().rope_parameters = dict(_ROPE[name])
    return miniature(config, [threshold.name for threshold in thresholds(config, _LONGEST)])


def all_cases() -> tuple[Case, ...]:
    """Every causal-LM type of the installed transformers, the telling options, and classes outside the mapping."""
    known = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    plain = [Case(name, name, load={"max_model_len": 128} if name in _PURE else {}) for name in known]
    options = [Case(f"{kind}: {word}", kind, options=fields) for kind, word, fields in _VARIANTS if kind in known]
    whisper = [Case("whisper: max_model_len", "whisper", load={"max_model_len": 128})] if "whisper" in known else []
    live = [Case(name, class_name=name) for name in _CLASSES if hasattr(transformers, name)]
    wrappers = [Case(f"{name} (wrapper)", wrapper=name) for name in wrapper_types()]
    return (*plain, *options, *whisper, *live, *wrappers)


def named_cases(names: tuple[str, ...]) -> tuple[Case, ...]:
    """The cases of these names; a model type's name stands for its options as well.

    Raises:
        KeyError: a name that no case has.
    """
    cases = all_cases()
    unknown = [n for n in names if not any(n in (c.name, c.model_type, c.wrapper, _kind_word(c)) for c in cases)]
    if unknown:
        raise KeyError(f"the installed transformers has no case {', '.join(unknown)}")
    return tuple(c for c in cases if {c.name, c.model_type, c.wrapper, _kind_word(c)} & set(names))


def _kind_word(case: Case) -> str | None:
    """A word that names all cases of its kind."""
    return "wrappers" if case.wrapper is not None else None


def tiny_config(case: Case) -> Any:
    """The shrunk configuration of a case."""
    if case.wrapper is not None:
        return tiny_wrapper(case.wrapper)
    if case.class_name is not None:
        kind = getattr(transformers, case.class_name).config_class
    else:
        assert case.model_type is not None
        kind = type(transformers.AutoConfig.for_model(case.model_type))
    hints = HINTS.get(case.model_type or case.class_name or "", {})
    return kind(**_fields(kind, hints, case.options))


def _fields(kind: Any, hints: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for a configuration class.

    Args:
        hints: fields of the class; under a nested configuration's name, fields of that.
        options: fields of the text configuration, where there is one, else of the class.
    """
    nested = {n: v for n, v in hints.items() if n in getattr(kind, "sub_configs", {}) and isinstance(v, Mapping)}
    hints = {n: v for n, v in hints.items() if n not in nested}
    names = _field_names(kind)
    subs = {n: k for n, k in getattr(kind, "sub_configs", {}).items() if n in names}
    fields: dict[str, Any] = {}
    to_text = "text_config" in subs
    for name, declared in subs.items():
        sub = _sub_kind(kind, name, declared)
        more = options if name == "text_config" else {}
        made = _sub_fields(sub, nested.get(name, {}), more, name in _ENCODERS_ONLY)
        if made is not None:
            fields[name] = made
    fields |= {n: v for n, v in SMALL.items() if n in names and n not in subs}
    if "kv_lora_rank" in names:
        fields |= {n: v for n, v in _LATENT.items() if n in names}
        fields.pop("head_dim", None)
    if "rope_parameters" in names:
        rope = _tiny_rope(kind)
        fields |= {} if rope is None else {"rope_parameters": rope}
    return {**fields, **hints} if to_text else {**fields, **hints, **options}


def _sub_kind(kind: Any, name: str, declared: Any) -> Any:
    """A nested configuration's class; where AutoConfig is declared, that of the default."""
    if hasattr(declared, "model_type"):
        return declared
    try:
        return type(getattr(kind(), name))
    except (ValueError, TypeError, AttributeError, KeyError):
        return declared


def _sub_fields(
    kind: Any, hints: Mapping[str, Any], options: Mapping[str, Any], encoder: bool
) -> dict[str, Any] | None:
    if not hasattr(kind, "model_type"):
        return None
    fields = _fields(kind, hints, options)
    if encoder:
        fields = {n: v for n, v in fields.items() if not n.startswith(("is_decoder", "use_cache", "vocab"))}
        fields |= {n: 2 for n in ("num_hidden_layers", "num_layers") if n in fields}
    if getattr(kind, "model_type", ""):
        fields.setdefault("model_type", kind.model_type)
    return fields


def _field_names(kind: Any) -> set[str]:
    """Names that the configuration class takes."""
    try:
        made = kind()
    except (ValueError, TypeError, AttributeError, KeyError):
        return set(getattr(kind, "__dataclass_fields__", {})) or set(SMALL)
    skipped = set(kind.attribute_map) if hasattr(kind, "attribute_map") else set()
    return (set(made.to_dict()) | set(getattr(kind, "__dataclass_fields__", {}))) - skipped


def _tiny_rope(kind: Any) -> dict[str, Any] | None:
    """The class's own rotary parameters, with the length they were trained for at the threshold."""
    try:
        own = kind().rope_parameters
    except (ValueError, TypeError, AttributeError, KeyError):
        return None
    if not isinstance(own, dict) or "original_max_position_embeddings" not in own:
        return None
    return {**own, "original_max_position_embeddings": THRESHOLD}
