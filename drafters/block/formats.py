"""config.json of block-parallel heads, by exporter, as a BlockSpec: a key that changes arithmetic is read or refused.

Source: z-lab/dflash, dflash/model.py (DFlashDraftModel); deepseek-ai/DeepSpec, deepspec/modeling/dspark/qwen3;
vllm-project/speculators 0.9.0, speculators/models/{dflash,dspark,dflash2}; sgl-project/SpecForge; transformers,
muse_glimmer_assistant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from drafters.base import FINAL_NORM, Layers, TargetFacts
from drafters.block.spec import BlockSpec
from drafters.checkpoints.config_fields import (
    UNKNOWN,
    Config,
    PlacedConfig,
    ResolvedField,
    ResolvedFields,
    Shapes,
    by_presence,
    lookup,
    read,
    resolve_rope,
    resolve_windows,
    unread_fields,
)
from drafters.checkpoints.layer_fields import refuse_quantised, size_fields, vocabulary_fields
from drafters.checkpoints.layouts import speculators_type
from drafters.errors import HeadLoadError, HeadMismatchError

_NESTED = ("dflash_config", "dspark_config")
"""Objects whose keys may as well stand at the top."""
_LAYER = "transformer_layer_config"
"""The layers' configuration in files of speculators; keys at the top go before it."""
AUX, AUX_COUNTED, _NON_CAUSAL = "target_layer_ids", "aux_hidden_state_layer_ids", "sliding_window_non_causal"
_MARKOV, _CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"
_READ = {
    *("hidden_size", "target_hidden_size", "vocab_size", "draft_vocab_size", "intermediate_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "num_target_layers", "rms_norm_eps"),
    *("hidden_act", "hidden_activation", "attention_bias", "use_qk_norm", "mlp_bias", "quantization_config"),
    *("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "max_position_embeddings"),
    *("layer_types", "sliding_window", "use_sliding_window", "is_causal", "sliding_attention_causal"),
    *("block_size", "mask_token_id", AUX, AUX_COUNTED, "use_aux_hidden_state", "sample_from_anchor", _NON_CAUSAL),
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    "confidence_temperatures",
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
}
_OF_TRAINING = {"num_anchors", "max_anchors"}
REFINED = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


@dataclass(frozen=True)
class BlockFormat:
    """What the class of one exporter does where config.json does not say.

    Attributes:
        name: used in reports. slots: see `BlockSpec`; None where only the flag decides.
        causal_windows: layers with a window are causal.
        sizes: keys that its heads alone have, fields of `BlockSpec`: of convolutions and a selector.
        inclusive: a window of W reaches |i - j| = W.
    """

    name: str
    slots: str | None
    causal_windows: bool
    sizes: tuple[str, ...] = ()
    inclusive: bool = False


FORMATS: Mapping[str, BlockFormat] = {
    "DFlashDraftModel": BlockFormat("DFlash, z-lab/SpecForge", "fill-in", causal_windows=True),
    "DSparkDraftModel": BlockFormat("DSpark, SpecForge", None, causal_windows=True),
    "DFlash2DraftModel": BlockFormat("DFlash2, z-lab", "fill-in", causal_windows=True, sizes=REFINED),
    "Qwen3DSparkModel": BlockFormat("DSpark, DeepSpec", "anchor-first", causal_windows=False),
    "MuseGlimmerAssistantModel": BlockFormat("DFlash, transformers", "fill-in", causal_windows=False, inclusive=True),
    "speculators dflash": BlockFormat("DFlash, speculators", "fill-in", causal_windows=True),
    "speculators dspark": BlockFormat("DSpark, speculators", "anchor-first", causal_windows=True),
    "speculators dflash2": BlockFormat("DFlash2, speculators", "fill-in", causal_windows=False, sizes=REFINED),
}
"""By the class in config.json, which alone tells how a plain head without flags is read, and DFlash2 from DFlash; those
of speculators by `speculators_model_type`, as the package writes several classes for each."""


def format_of(config: Config) -> BlockFormat:
    """The format of a head's config.json.

    Raises:
        HeadLoadError: it is of another class, or its layers are not Qwen3's.
    """
    own = speculators_type(config)
    kinds = config.get("architectures") if own is None else [f"speculators {own}"]
    found = [FORMATS[kind] for kind in kinds if kind in FORMATS] if isinstance(kinds, list) else []
    if len(found) != 1:
        raise HeadLoadError(
            f"config.json says architectures = {kinds!r}: of block-parallel heads {', '.join(FORMATS)} are supported"
        )
    for kind in (config.get("model_type"), _layer_of(config).get("model_type")):
        if kind not in ("qwen3", "muse_glimmer_assistant", None):
            raise HeadLoadError(
                f"config.json says model_type = {kind!r}: block-parallel heads of Qwen3 layers (model_type 'qwen3') "
                "are supported, for any target"
            )
    return found[0]


def _layer_of(config: Config) -> Config:
    """The configuration of its layers, as speculators nests it; {} without one."""
    layer = config.get(_LAYER) or {}
    if not isinstance(layer, dict):
        raise HeadLoadError(f"config.json says {_LAYER} = {layer!r}: allowed is an object")
    return layer


def flattened(config: Config) -> PlacedConfig:
    """The configuration with the keys of nested objects at the top.

    Raises:
        HeadLoadError: a key has two values.
    """
    inner = {key: value for key, value in _layer_of(config).items() if config.get(key) is None}
    flat = {key: value for key, value in {**config, **inner}.items() if key not in (*_NESTED, _LAYER)}
    origins = {key: f"{_LAYER}.{key}" for key in inner}
    for name in _NESTED:
        for key, value in (config.get(name) or {}).items():
            if flat.get(key, value) != value:
                raise HeadLoadError(f"config.json contradicts itself: {key} = {flat[key]!r}, {name}.{key} = {value!r}")
            flat[key], origins[key] = value, f"{name}.{key}"
    return PlacedConfig(flat, origins)


def resolve_block(config: Config, shapes: Shapes, target: TargetFacts) -> tuple[BlockSpec, ResolvedFields]:
    """Resolve every field of the spec, with its source. shapes: tensor shapes by parameter.

    Raises:
        HeadMismatchError: made for a target of another hidden size, vocabulary or number of layers.
        HeadLoadError: the configuration is incomplete, contradictory or needs something unsupported.
    """
    written, config = format_of(config), flattened(config)
    refuse_quantised(config, "block-parallel")
    config.setdefault("vocab_size", target.vocab_size)  # transformers' has none
    present, first = partial(by_presence, config, shapes), "layers.0."
    layers = read(config, "num_layers", int, "num_hidden_layers")
    windows = resolve_windows(config, layers.value)
    if written.inclusive and windows[0].value:
        windows[1] = ResolvedField("window", windows[1].value + 1, f"{windows[1].source}, which itself is inside")
    fields = (
        *size_fields(config, target),
        *vocabulary_fields(config, shapes),
        layers,
        read(config, "rms_norm_eps", float, default=1e-6),
        resolve_rope(config),
        present("qkv_bias", first + "self_attn.q_proj.bias", "attention_bias"),
        present("o_bias", first + "self_attn.o_proj.bias", "attention_bias"),
        present("mlp_bias", first + "mlp.gate_proj.bias", "mlp_bias"),
        present("qk_norm", first + "self_attn.q_norm.weight", "use_qk_norm"),
        *windows,
        _causal_layers(config, written, layers.value, windows[0].value),
        _aux_layers(config, target, layers.value),
        read(config, "block_size", int),
        read(config, "mask_token_id", int),
        _slots(config, written),
        *_markov(config, shapes),
        *(read(config, key, int) for key in written.sizes),
        *_confidence(config, shapes),
        read(config, "embedding_scale", float, "input_embedding_scale", default=1.0),
        read(config, "logit_scale", float, "output_multiplier", default=1.0),
        _softcap(config),
    )
    return BlockSpec(**{field.name: field.value for field in fields}), (*fields, *_unread(config, written))


def _unread(config: Config, written: BlockFormat) -> ResolvedFields:
    """The keys that decide nothing. Raises HeadLoadError: there are others."""
    kind = ("projector_type",) if lookup(config, "projector_type") == "dspark" else ()  # its tensors show what it has
    fields = unread_fields(config, {*_READ, *_OF_TRAINING, *written.sizes, *kind}, layers_are_chosen=True)
    for field in fields:
        if field.name == UNKNOWN:
            raise HeadLoadError(
                f"config.json has keys that are not understood, and a head that is run otherwise than it was trained "
                f"drafts in vain: {field.value}"
            )
    return fields


def _causal_layers(config: Config, written: BlockFormat, num_layers: int, windowed: Layers) -> ResolvedField:
    """Layers whose slots see none after their own. `is_causal` holds for all layers, the others for those with a
    window."""
    if lookup(config, "is_causal") is not None:
        flag = read(config, "is_causal", bool)
        return ResolvedField("causal_layers", tuple(range(num_layers)) if flag.value else (), flag.source)
    if lookup(config, _NON_CAUSAL) is not None:
        flag = read(config, _NON_CAUSAL, bool)
        return ResolvedField("causal_layers", () if flag.value else windowed, flag.source)
    source = f"default of {written.name}"
    flag = read(
        config,
        "sliding_attention_causal",
        bool,
        default=written.causal_windows,
        default_source=f"{source}, where there is a window",
    )
    return ResolvedField("causal_layers", windowed if flag.value else (), flag.source)


def _aux_layers(config: Config, target: TargetFacts, num_layers: int) -> ResolvedField:
    """Aux layers: id i is the state after layer i, b = i + 1; -1 the embeddings; of the last layer transformers has the
    state after the final norm. Ids of speculators are numbered as here.

    Raises:
        HeadLoadError: not ascending numbers, or they are not used. HeadMismatchError: the target has other layers.
    """
    shift = int(speculators_type(config) is None)
    key = (AUX_COUNTED, AUX)[shift]
    counted, given = lookup(config, "num_target_layers"), lookup(config, key)
    if counted not in (None, target.num_layers):
        raise HeadMismatchError(
            f"the head was made for a target of {counted} layers, this target has {target.num_layers}"
        )
    if lookup(config, "use_aux_hidden_state") is False:
        raise HeadLoadError("config.json says use_aux_hidden_state = False: heads that read aux states are supported")
    source = f"config {key}" + ", each layer's output" * shift
    if given is None and shift:
        given, source = _default_ids(target.num_layers, num_layers), "default: evenly spaced"
    whole = isinstance(given, list) and given and all(type(i) is int for i in given)
    if not whole or given != sorted(set(given)) or given[0] < -shift:
        raise HeadLoadError(f"config.json: {key} must be ascending numbers from {-shift} on, not {given!r}")
    last = target.num_layers - shift
    if given[-1] > last:
        raise HeadMismatchError(f"the head reads layer {given[-1]}, the target has layers 0 … {last}")
    return ResolvedField("aux_layers", tuple(FINAL_NORM if shift and i == last else i + shift for i in given), source)


def _default_ids(num_target_layers: int, num_layers: int) -> list[int]:
    """The layers that are read where config.json names none.

    >>> _default_ids(36, 5), _default_ids(36, 1)
    ([1, 9, 17, 25, 33], [18])
    """
    if num_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + i * span / (num_layers - 1)) for i in range(num_layers)]


def _slots(config: Config, written: BlockFormat) -> ResolvedField:
    """Which token a slot predicts: by the flag, else by the class.

    Raises:
        HeadLoadError: no flag, and SpecForge's DSpark or a DFlash class with a Markov head: it is written for both.
    """
    if lookup(config, "sample_from_anchor") is not None:
        flag = read(config, "sample_from_anchor", bool)
        return ResolvedField("slots", "anchor-first" if flag.value else "fill-in", flag.source)
    if not written.slots or (written.slots == "fill-in" and lookup(config, "markov_rank")):
        raise HeadLoadError(
            f"a head of {written.name} with a Markov head: whether slot 0 predicts a token is not known of it; set "
            "sample_from_anchor in config.json, true (as DSpark) or false (as DFlash)"
        )
    return ResolvedField("slots", written.slots, f"architectures: {written.name}")


def _markov(config: Config, shapes: Shapes) -> list[ResolvedField]:
    rank = read(config, "markov_rank", int, default=0)
    by_presence({"markov_rank": rank.value}, shapes, "markov", _MARKOV, "markov_rank")
    if not rank.value:
        return [rank, ResolvedField("markov", None, f"{_MARKOV} absent")]
    return [rank, read(config, "markov", str, "markov_head_type", default="vanilla")]


def _confidence(config: Config, shapes: Shapes) -> ResolvedFields:
    """The confidence head's input and temperatures; these are specdec's own key."""
    found = by_presence(config, shapes, "confidence", _CONFIDENCE, "enable_confidence_head")
    tokens = read(config, "confidence_head_with_markov", bool, default=False).value
    kind = None if not found.value else "outputs and tokens" if tokens else "outputs"
    given = read(config, "confidence_temperatures", list, default=[])
    return ResolvedField("confidence", kind, found.source), replace(given, value=tuple(given.value))


def _softcap(config: Config) -> ResolvedField:
    key = "final_logit_softcapping"
    cap = None if lookup(config, key) is None else read(config, key, float)
    if cap is None or cap.value <= 0:
        return ResolvedField("logit_softcap", None, "none")
    return ResolvedField("logit_softcap", cap.value, cap.source)
