"""How exporters write EAGLE-3 heads: one description per exporter, for the code that reads or writes their folders.

Tensor names are the same except for the prefix of the first layer. Exporters differ in where config.json keeps a value,
in the meaning of aux layer ids, and in default values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from drafters.base import FINAL_NORM, Layers
from drafters.checkpoints.config_fields import Config, PlacedConfig, ResolvedField, lookup, place_of, read
from drafters.checkpoints.tensor_files import Json
from drafters.eagle3.overrides import AUX_LAYERS, KEYS, NESTED_AUX_LAYERS, TARGET_LAYERS, USE_AUX, Eagle3Overrides
from drafters.eagle3.spec import default_aux_layers
from drafters.errors import HeadLoadError, HeadMismatchError

Ids = Literal["aux layers", "ids of layers whose output is read"]
NUMBERS: Ids = "aux layers"
OUTPUTS: Ids = "ids of layers whose output is read"
"""What a number in a list of aux layers is: aux layer b as in `drafters.base`, or layer b - 1."""
AUX_KEYS: Mapping[str, Ids] = {NESTED_AUX_LAYERS: OUTPUTS, AUX_LAYERS: NUMBERS, TARGET_LAYERS: OUTPUTS}
"""Keys of lists of aux layers: SpecForge's, SGLang's and ModelOpt's; speculators' and vLLM's; DeepSpec's."""


@dataclass(frozen=True)
class Format:
    """How one exporter writes an EAGLE-3 head.

    Attributes:
        name: used in reports.
        architectures: words of config.json's `architectures` that only this exporter writes.
        keys: keys (dotted) that only this exporter writes.
        layer_config: the object that holds the decoder layer's own configuration without its class's default values;
            None: it lies at the top, complete.
        layer_type: model_type of a `layer_config` object that names none.
        target: key of the name of the target that the head was made for.
        deep_norm: the pre-attention norm of a further layer that has both norms.
        first_position: rotary position of the token at position 0 of the target's states; see `RopeSpec`.
        defaults: by key, the value that the exporter's own reader uses when the key is absent, and a note for reports.
        feedback_note: note for reports where `norm_output` is true.
    """

    name: str
    architectures: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    layer_config: str | None = None
    layer_type: str = "llama"
    target: str | None = None
    deep_norm: Literal["hidden_norm", "input_layernorm"] = "hidden_norm"
    first_position: int = 0
    defaults: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    feedback_note: str = ""


SAFEAILAB = Format("SafeAILab")
"""Source: SafeAILab/EAGLE, eagle/model/cnets.py, eagle/traineagle3/config.json."""
SPECFORGE = Format(
    "SpecForge/SGLang",
    architectures=("LlamaForCausalLMEagle3",),
    keys=("eagle_config", "norm_output", "fc_norm", "norm_before_fc"),
    feedback_note="heads that SpecForge trained before September 2026 were fed the state before the norm all the same: "
    "if few drafts are accepted, give head_overrides feedback='pre_norm'",
)
"""Source: sgl-project/SpecForge; sgl-project/sglang python/sglang/srt/models/llama_eagle3.py."""
MODELOPT = Format(
    "NVIDIA ModelOpt",
    keys=(
        "eagle_config.use_last_layernorm",
        "eagle_config.next_layer_regular",
        "eagle_config.use_input_layernorm_in_first_layer",
    ),
)
"""Source: NVIDIA/TensorRT-Model-Optimizer modelopt/torch/export/plugins/hf_spec_export.py."""
ANGELSLIM = Format("AngelSlim", architectures=("Eagle3LlamaForCausalLM",))
"""Source: Tencent/AngelSlim angelslim/compressor/speculative/train/configs."""
DEEPSPEC = Format(
    "DeepSpec",
    architectures=("Qwen3Eagle3Model",),
    keys=("draft_num_hidden_layers", "step_loss_decay"),
    target="target_model_name_or_path",
)
"""Source: deepseek-ai/DeepSpec deepspec/modeling/eagle3/common.py (ids), qwen3/modeling.py."""
SPECULATORS = Format(
    "speculators",
    architectures=("Eagle3Speculator", "Eagle3DraftModel"),
    keys=("speculators_model_type", "speculators_config"),
    layer_config="transformer_layer_config",
    layer_type="qwen3",
    target="speculators_config.verifier.name_or_path",
    deep_norm="input_layernorm",
    first_position=1,
    defaults={
        "draft_vocab_size": (32000, "default of speculators"),
        "norm_before_residual": (
            False,
            "default of speculators; vLLM takes true: if few drafts are accepted, give head_overrides "
            "norm_before_residual=true",
        ),
    },
)
"""Source: vllm-project/speculators 0.9, speculators/models/eagle3/config.py, core.py (position_ids = 1 + arange)."""

FORMATS = (SPECULATORS, DEEPSPEC, ANGELSLIM, MODELOPT, SPECFORGE, SAFEAILAB)
"""In the order in which they are recognised; the last has no distinguishing marks."""


def format_of(config: Config) -> Format:
    """The exporter that wrote a head's config.json; SafeAILab's layout if no other is recognised."""
    named = lookup(config, "architectures")
    names = set(named) if isinstance(named, list) and all(isinstance(name, str) for name in named) else set()
    for found in FORMATS:
        if any(lookup(config, key) is not None for key in found.keys) or names & set(found.architectures):
            return found
    return SAFEAILAB


def target_named_by(config: Config) -> str | None:
    """The target that a head was made for, by its own config.json; None where that names none."""
    key = format_of(config).target
    name = None if key is None else lookup(config, key)
    return name if isinstance(name, str) and name else None


def flattened(config: Config) -> PlacedConfig:
    """A head's config.json with all keys at the top: the decoder layer's own object, if it has one, completed.

    Raises:
        HeadLoadError: that object is missing, contradicts the keys at the top, or is invalid for its model_type.
    """
    found = format_of(config)
    flat = dict(config)
    origins: dict[str, str] = {}
    if found.layer_config is not None:
        layer, origins = _completed(config, found)
        flat = layer | {key: value for key, value in config.items() if value is not None}
        origins = {key: origin for key, origin in origins.items() if config.get(key) is None}
    for key, (value, note) in found.defaults.items():
        if flat.get(key) is None:
            flat[key] = value
            origins[key] = f"{key} (absent: {note})"
    return PlacedConfig(flat, origins)


def _completed(config: Config, found: Format) -> tuple[Json, dict[str, str]]:
    """The layer's object with its class's defaults, which exporters leave out, and where each value is from."""
    key = found.layer_config or ""
    nested = config.get(key)
    if not isinstance(nested, Mapping):
        raise HeadLoadError(f"config.json of a {found.name} head must have an object {key}, not {nested!r}")
    kind = nested.get("model_type", found.layer_type)
    if kind not in ("llama", "qwen3"):
        raise HeadLoadError(f"{key}.model_type is {kind!r}; {found.name} makes EAGLE-3 layers of llama and qwen3")
    own = [name for name in KEYS if name in nested and name != "model_type"]
    twice = [name for name in own if config.get(name) not in (None, nested[name])]
    if twice:
        said = "; ".join(f"{name} = {config[name]!r} and {key}.{name} = {nested[name]!r}" for name in twice)
        raise HeadLoadError(f"config.json contradicts itself: {said}")
    given = {name: value for name, value in nested.items() if name not in ("model_type", "transformers_version")}
    try:
        whole = AutoConfig.for_model(kind, **given)
    # Values of a foreign file: transformers validates few of them, so wrong types and zeros fail anywhere in its code.
    except (StrictDataclassError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise HeadLoadError(f"{key} is no configuration of a {kind} layer: {error}") from error
    layer = whole.to_dict() | {"use_qk_norm": kind == "qwen3"}
    kept = {"rope_parameters"} if {"rope_theta", "rope_scaling"} & set(given) else set()  # one spelling of the two
    named = {name: f"{key}.{name}" for name in layer if name in given or name in kept}
    absent = {name: f"{key}.{name} (absent: default of {type(whole).__name__})" for name in layer if name not in named}
    return layer, absent | named | {"use_qk_norm": f"{key}.model_type"}


_DEEPSEEK = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite")
"""Targets of which SGLang reads nested ids as aux layers unless the first is 1; SpecForge's template of Kimi-K2 has
[2, 30, 58], the default aux layers. A list of aux layers in the same file takes precedence.

Source: sgl-project/sglang 0.5.23, models/deepseek_v2.py, glm4_moe_lite.py (set_eagle3_layers_to_capture).
"""


def resolve_aux_layers(config: Config, num_layers: int, overrides: Eagle3Overrides, model_type: str) -> ResolvedField:
    """Aux layers. Nested ids name the layer whose output is meant: aux layer = id + 1;
    unless the largest id is the number of layers, or the target is one of `_DEEPSEEK`: then, like top-level ids, they
    are aux layers already.

    config: the head's, all keys at the top. num_layers, model_type: N and the text configuration's, of the target.

    Raises:
        HeadLoadError: no list of numbers, several that disagree, or DeepSpec's with the target's last layer.
        HeadMismatchError: a layer that the target does not have.
    """
    layers = overrides.aux_layers
    source = "chosen by the user"
    if layers is None:
        used = read(config, "use_aux_hidden_state", bool, *USE_AUX, default=True)
        if not used.value:  # before the list, which NVIDIA ModelOpt writes as [] in this case
            return ResolvedField("aux_layers", (FINAL_NORM,), used.source)
        listed = _listed_layers(config, num_layers, model_type)
        if len(set(listed.values())) > 1:
            raise HeadLoadError(
                f"config.json names different aux layers: {listed} (as numbered here); choose by head_overrides, as "
                '{"aux_layers": […]}'
            )
        layers = next(iter(listed.values()), None) or default_aux_layers(num_layers)
        source = "config " + ", ".join(listed) if listed else "default 2, N//2, N-3"
    if max(layers) > num_layers:
        raise HeadMismatchError(f"the head reads aux layers {layers}, this target has {num_layers} layers")
    count = lookup(config, "num_aux_hidden_states")
    if count not in (None, len(layers)):
        raise HeadLoadError(f"config.json says num_aux_hidden_states = {count}, but the aux layers are {layers}")
    return ResolvedField("aux_layers", layers, source)


def _listed_layers(config: Config, num_layers: int, model_type: str) -> dict[str, Layers]:
    listed = {}
    for key, meaning in AUX_KEYS.items():
        ids = lookup(config, key)
        if ids is None:
            continue
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise HeadLoadError(f"config.json: {key} must be a list of layer numbers, not {ids!r}")
        if key == TARGET_LAYERS and max(ids) == num_layers - 1:
            raise HeadLoadError(
                f"config.json: {key} = {ids} has the target's last layer, which transformers returns after the final "
                "norm; DeepSpec's own evaluation does not run such heads either"
            )
        note = ""
        if key == NESTED_AUX_LAYERS and max(ids) == num_layers:
            meaning = NUMBERS  # no layer has the number num_layers
        elif key == NESTED_AUX_LAYERS and model_type in _DEEPSEEK and ids[0] != 1 and not lookup(config, AUX_LAYERS):
            meaning = NUMBERS
            note = f", as SGLang does for {model_type}"
        listed[f"{place_of(config, key)} (read as {meaning}{note})"] = (
            tuple(i + 1 for i in ids) if meaning == OUTPUTS else tuple(ids)
        )
    return listed
