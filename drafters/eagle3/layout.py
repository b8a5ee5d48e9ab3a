"""EAGLE-3 checkpoints in every exporter's layout (`formats`): names and config.json -> Eagle3Spec, and back.

Whether an optional module exists is decided by its tensor; a config flag that contradicts it is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from attention.errors import InvalidInputError
from drafters.base import TargetFacts
from drafters.checkpoints.config_fields import (
    Config,
    ResolvedField,
    ResolvedFields,
    Shapes,
    by_presence,
    lookup,
    read,
    resolve_rope,
    resolve_windows,
    rope_to_config,
)
from drafters.checkpoints.layer_fields import refuse_quantised, size_fields, vocabulary_fields
from drafters.checkpoints.tensor_files import Json
from drafters.eagle3.formats import Format, flattened, format_of, resolve_aux_layers
from drafters.eagle3.overrides import (
    AUX_LAYERS,
    LM_HEAD_FLAG,
    MTP_LAYERNORM,
    PARALLEL_DRAFT_STEP,
    UNSUPPORTED,
    Eagle3Overrides,
)
from drafters.eagle3.spec import Eagle1Spec, Eagle3Spec
from drafters.errors import HeadLoadError
from drafters.layer_spec import LayerSpec

_LEGACY_AUX_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
_DEEP_NORM = re.compile(r"layers\.(\d+)\.hidden_norm\.(.*)")
_DEEP_LAYER = re.compile(r"layers\.(\d+)\.")
_MODELOPT_FLAGS = {
    "norm.weight": "eagle_config.use_last_layernorm",
    "midlayer.input_layernorm.weight": "eagle_config.use_input_layernorm_in_first_layer",
}
_ROTARY_BUFFER = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)")


def canonical_names(names: Mapping[str, str], deep_norm: str) -> dict[str, str]:
    """Map the head's parameter names to the names in the files. names: these, by the names without prefixes.

    `layers.0.` becomes `midlayer.`; the pre-attention norm of a further layer may be called `hidden_norm` (SGLang) or
    `input_layernorm` (vLLM, speculators). Where both are stored, `deep_norm` names the right one.

    Raises:
        HeadLoadError: two tensors are the same parameter.
    """
    canonical: dict[str, str] = {}
    for short, name in sorted(names.items()):
        parameter = _parameter_name(short)
        if parameter in canonical:
            raise HeadLoadError(f"tensors {canonical[parameter]} and {name} are both {parameter}")
        canonical[parameter] = name
    for parameter in [name for name in canonical if _DEEP_NORM.fullmatch(name)]:
        name = canonical.pop(parameter)
        one = _DEEP_NORM.sub(r"layers.\1.input_layernorm.\2", parameter)
        if one not in canonical or deep_norm == "hidden_norm":
            canonical[one] = name
    return canonical


def rotary_buffers(names: Iterable[str]) -> list[str]:
    """Stored buffers of rotary embeddings. They follow from the configuration, which takes precedence."""
    return sorted(name for name in names if _ROTARY_BUFFER.fullmatch(name))


def _parameter_name(short: str) -> str:
    for legacy, current in _LEGACY_AUX_NORMS.items():
        if short.startswith(legacy + "."):
            return current + short.removeprefix(legacy)
    return "midlayer." + short.removeprefix("layers.0.") if short.startswith("layers.0.") else short


def resolve_spec(
    config: Config, shapes: Shapes, target: TargetFacts, overrides: Eagle3Overrides
) -> tuple[Eagle3Spec, ResolvedFields]:
    """Resolve every field of the spec, with its source. shapes: tensor shapes by canonical name.

    Raises:
        HeadMismatchError: made for a target of another hidden size or vocabulary.
        HeadLoadError: the configuration is incomplete, contradictory or needs something unsupported.
    """
    written = format_of(config)
    config = overrides.applied(flattened(config))
    query = shapes.get("layers.1.self_attn.q_proj.weight")
    hidden = shapes.get("layers.1.self_attn.o_proj.weight")
    if query is not None and hidden is not None and query[-1] == 2 * hidden[0]:
        raise HeadLoadError(
            "the head's further layers read [embedding, hidden] like its first (DeepSpec with draft_num_hidden_layers "
            "above 1, which DeepSpec's own evaluation does not run either); heads whose further layers read the hidden "
            "state are supported"
        )
    fields = (
        *_layer_fields(config, shapes, target, written.first_position),
        *_vocabulary(config, shapes),
        resolve_aux_layers(config, target.num_layers, overrides, target.model_type),
        *_modules(config, shapes),
        _feedback(config, overrides, written),
    )
    return Eagle3Spec(**{field.name: field.value for field in fields}), fields


def _layer_fields(config: Config, shapes: Shapes, target: TargetFacts, first_position: int = 0) -> list[ResolvedField]:
    """The fields that an EAGLE head of any kind has.

    Raises:
        HeadLoadError, HeadMismatchError: see `resolve_spec`.
    """
    _refuse_unsupported(config)
    layers = _num_layers(config, shapes, target)
    attention = "midlayer.self_attn."
    present = partial(by_presence, config, shapes)
    return [
        *size_fields(config, target),
        layers,
        read(config, "rms_norm_eps", float, default=1e-6),
        resolve_rope(config, first_position),
        present("fc_bias", "fc.bias", "bias"),
        present("qkv_bias", attention + "q_proj.bias", "attention_bias", "qkv_bias"),
        present("o_bias", attention + "o_proj.bias"),
        present("mlp_bias", "midlayer.mlp.gate_proj.bias", "mlp_bias"),
        present("qk_norm", attention + "q_norm.weight", "use_qk_norm"),
        *resolve_windows(config, layers.value),
    ]


def resolve_eagle1(
    config: Config, shapes: Shapes, target: TargetFacts, overrides: Eagle3Overrides
) -> tuple[Eagle1Spec, ResolvedFields]:
    """As `resolve_spec`, of an EAGLE-1 or EAGLE-2 head."""
    if overrides.aux_layers is not None or overrides.feedback is not None:
        raise HeadLoadError(
            "aux_layers and feedback cannot be chosen for an EAGLE-1 head: it reads the target's last state and is fed "
            "its own output"
        )
    config = overrides.applied(flattened(config))
    norm = "midlayer.input_layernorm.weight"
    fields = (*_layer_fields(config, shapes, target), by_presence(config, shapes, "first_norm", norm))
    values = {field.name: field.value for field in fields}
    return Eagle1Spec(**values, draft_vocab_size=values["vocab_size"]), fields


def _refuse_unsupported(config: Config) -> None:
    """Refuse configurations of features that no EAGLE head here computes.

    Raises:
        HeadLoadError: quantised weights, another activation, several heads, or ModelOpt's norms of inputs.
    """
    refuse_quantised(config, "EAGLE")
    # Source: NVIDIA/TensorRT-Model-Optimizer modelopt/torch/export/plugins/hf_spec_export.py (eagle_config).
    for key in PARALLEL_DRAFT_STEP:
        steps = lookup(config, key)
        if steps not in (None, 1):
            raise HeadLoadError(
                f"config.json says {key} = {steps!r}: the head drafts several tokens at once by heads of their own "
                "(parallel_draft_heads), which is not supported"
            )
    for key in UNSUPPORTED + MTP_LAYERNORM:
        if value := lookup(config, key):
            reason = f", which is not supported; if the head was made without it, give head_overrides {key}=false"
            if key in MTP_LAYERNORM:
                reason = (
                    ": the head normalises its inputs like a multi-token-prediction module (enorm, hnorm), which is "
                    "not supported for EAGLE-3 heads"
                )
            raise HeadLoadError(f"config.json says {key} = {value!r}{reason}")


def _num_layers(config: Config, shapes: Shapes, target: TargetFacts) -> ResolvedField:
    """Decoder layers, counted by their tensors; shapes: by canonical name. Many published heads of one layer have their
    target's config.json with the target's number of layers (SafeAILab's Vicuna heads, AngelSlim's templates).

    Raises:
        HeadLoadError: the configuration has another number.
    """
    stored = 1 + len({found[1] for name in shapes if (found := _DEEP_LAYER.match(name))})
    said = read(config, "num_layers", int, "num_hidden_layers", default=stored, default_source="tensors")
    if said.value == stored:
        return said
    if stored == 1 and said.value == target.num_layers:
        return ResolvedField("num_layers", 1, f"tensors ({said.source} = {said.value} is the target's)")
    raise HeadLoadError(
        f"config.json says num_hidden_layers = {said.value}, but the checkpoint has tensors of {stored} layer(s)"
    )


def _vocabulary(config: Config, shapes: Shapes) -> list[ResolvedField]:
    draft, own_embed, own_lm_head = vocabulary_fields(config, shapes)
    if not own_lm_head.value and lookup(config, LM_HEAD_FLAG) is False:
        raise HeadLoadError(f"config.json says {LM_HEAD_FLAG} = False, but the checkpoint has no lm_head.weight")
    if not own_embed.value:
        unscaled = ": the target's rows, without the factor that some targets (Gemma) multiply them by"
        own_embed = replace(own_embed, source=own_embed.source + unscaled)
    return [draft, own_embed, own_lm_head]


def _modules(config: Config, shapes: Shapes) -> list[ResolvedField]:
    present = partial(by_presence, config, shapes)
    for tensor, key in _MODELOPT_FLAGS.items():
        present(tensor, tensor, key)  # the tensor is needed anyway: only for a flag that contradicts it
    return [
        present("input_norm", "input_norm.weight", "norm_before_fc", "eagle_config.norm_before_fc"),
        present("fc_norm", "fc_norm.0.weight", "fc_norm", "use_aux_norm", "eagle_config.fc_norm"),
        read(config, "norm_before_residual", bool, default=False),
    ]


def _feedback(config: Config, overrides: Eagle3Overrides, written: Format) -> ResolvedField:
    if overrides.feedback is not None:
        return ResolvedField("feedback", overrides.feedback, "chosen by the user")
    flag = read(config, "norm_output", bool, "norm_output", "eagle_config.norm_output", default=False)
    note = f"; {written.feedback_note}" if flag.value and written.feedback_note else ""
    return ResolvedField("feedback", "post_norm" if flag.value else "pre_norm", flag.source + note)


def spec_to_config(spec: Eagle3Spec, dtype: str) -> Json:
    """config.json of a head in the SpecForge/SGLang layout; top-level layer ids are added for vLLM. dtype: of the
    stored weights, e.g. "bfloat16".

    Raises:
        InvalidInputError: its rotary embedding counts positions in a way that this layout does not have.
    """
    if spec.rope.kind == "dynamic" and spec.rope.first_position:
        raise InvalidInputError("a head of speculators with dynamic RoPE counts positions from 1; SGLang's from 0")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": dtype,
        **layer_sizes(spec),
        "target_hidden_size": spec.target_hidden_size,
        "draft_vocab_size": spec.draft_vocab_size if spec.own_lm_head else None,
        "tie_word_embeddings": False,
        "attention_bias": spec.qkv_bias,
        "mlp_bias": spec.mlp_bias,
        "use_qk_norm": spec.qk_norm,
        "bias": spec.fc_bias,
        "norm_before_fc": spec.input_norm,
        "fc_norm": spec.fc_norm,
        "norm_before_residual": spec.norm_before_residual,
        "norm_output": spec.feedback == "post_norm",
        **rope_to_config(spec.rope),
        **_aux_layers_to_config(spec),
        **_windows_to_config(spec),
    }


def layer_sizes(spec: LayerSpec) -> Json:
    """Sizes of a decoder layer as every layout has them, in the order of exported files, which tests compare whole."""
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_norm_eps,
    }


def _windows_to_config(spec: Eagle3Spec) -> Json:
    if not spec.windowed_layers:
        return {}
    kinds = (
        "sliding_attention" if layer in spec.windowed_layers else "full_attention" for layer in range(spec.num_layers)
    )
    return {"layer_types": list(kinds), "sliding_window": spec.window}


def _aux_layers_to_config(spec: Eagle3Spec) -> Json:
    if not spec.has_fc:
        return {"eagle_config": {"use_aux_hidden_state": False}}
    nested = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [b - 1 for b in spec.aux_layers]}
    return {"eagle_config": nested, AUX_LAYERS: list(spec.aux_layers), "num_aux_hidden_states": len(spec.aux_layers)}
