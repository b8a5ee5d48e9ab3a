"""Shrink a model's configuration: every kind of layer and every option stays, with narrow widths and low thresholds.

A threshold is an integer of a configuration that acts on lengths: a sliding window, a chunk of attention, a number of
keys that sparse attention keeps. Only longer rows show the behaviour past a threshold.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from attention.hf.model_specific import rotary_parameters
from specdec.values import Options

VOCAB = 128
MAX_POSITIONS = 512
"""Positions that a miniature has; its rows are shorter."""
_HIDDEN = 64
_HEADS = 4
_HEAD_DIM = 16
_ROPE_DIM = 8
_LOW = 20
_FAR = 4096
"""A threshold that is exercised, and one that no row of a miniature reaches."""
_MOST_LAYERS = 8
_LAYER_COUNT = re.compile(r"num_hidden_layers|n_layers?|(num_)?((de|en)coder_)?layers|depth")
_THRESHOLD = re.compile(
    r"window|chunk_size|local_attention$|index_topk$|floor_scale$|original_max_position|max_local|attention_span"
)
_NO_THRESHOLD = re.compile(r"layers|pattern|use_|_types|num_|freq|mamba_chunk_size|^chunk_size$")
"""Mamba's chunks are how it is computed, and change no token."""
_ROPE_THRESHOLD = "original_max_position_embeddings"
_BATCH_DEPENDENT_ROPE = "dynamic"

_SIZES = (
    (r"(.*_)?vocab_size(_per_layer_input)?", VOCAB),
    (r"(pad|bos|eos|sep|cls|mask|unk|decoder_start)_token_id", 0),
    (r"max_position_embeddings|max_target_positions|max_source_positions|n_positions|n_ctx|max_seq_len"
     r"|max_sequence_length|seq_length|model_max_length", MAX_POSITIONS),
    (r"qk_rope_head_dim", _ROPE_DIM),
    (r"qk_head_dim", _HEAD_DIM + _ROPE_DIM),
    (r"global_head_dim", 2 * _HEAD_DIM),
    (r"(.*_)?head_dim|kv_channels|d_head|d_kv|head_size|attention_head_size", _HEAD_DIM),
    (r"(.*_)?kv_lora_rank", 32),
    (r"(.*_)?(q|o)_lora_rank", 24),
    (r"laurel_rank|hidden_size_per_layer_input", _HEAD_DIM),
    (r"(.*_)?(intermediate_size|ffn_dim|n_inner|d_ff|ffn_hidden_size|ffn_intermediate_size|inner_dim|dff|ff_dim)"
     r"|(.*_)?intermediate_size_mlp", 48),
    (r"(.*_)?(hidden_size|d_model|n_embd|n_embed|embed_dim|embedding_size|embedding_dim|word_embed_proj_dim"
     r"|projection_dim|output_dim)|dim", _HIDDEN),
)  # fmt: skip
"""The value of an attribute of such a name."""
_MOST = (
    (r"(.*_)?(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_moe_experts)",
     8),
    (r"(.*_)?(num_experts_per_tok|num_experts_per_token|moe_topk|moe_top_k|moe_k|top_k_experts|num_selected_experts"
     r"|experts_per_token|num_experts_per_topk)", 2),
    (r"(.*_)?(n_group|num_expert_group)", 2),
    (r"(.*_)?topk_group", 1),
    (r"(n|num)_shared_experts", 1),
    (r"(mamba_)?(n_groups|ngroups)", 2),
    (r"(mamba_)?chunk_size", 16),
    (r"(mamba_)?d_state|(ssm_)?state_size", 8),
    (r"first_k_dense_replace|num_dense_layers|first_num_dense_layers|num_kv_shared_layers", 1),
)  # fmt: skip
"""Most of what an attribute of such a name may be."""
_MAMBA_HEADS = (("mamba_n_heads", "mamba_d_head"), ("n_mamba_heads", "mamba_headdim"), ("num_heads", "head_dim"))
"""Names of the number of a Mamba2 layer's heads and of their width, which together are as wide as the layer."""
_QUERY_HEADS = re.compile(
    r"(?!.*(key_value|kv))(.*_)?(num_attention_heads|num_heads|n_head|n_heads|attention_heads)(_per_layer)?"
)
_KV_HEADS = re.compile(r"(.*_)?(num_key_value_heads|num_kv_heads|n_kv_heads|kv_n_heads|multi_query_group_num)")


@dataclass(frozen=True)
class Threshold:
    """An integer of a configuration that acts on lengths: its name, and the length past which it acts."""

    name: str
    value: int


def thresholds(config: PreTrainedConfig, max_model_len: int) -> tuple[Threshold, ...]:
    """The thresholds of a text configuration that a row of max_model_len tokens passes, each name once."""
    text = config.get_text_config()
    own = {name: value for name, value in vars(text).items() if not name.startswith("_")}
    found = {
        name: value
        for name, value in _named_integers("", [own, *_layer_overrides(text).values()])
        if _is_threshold(name) and 1 <= value < max_model_len
    }
    return tuple(Threshold(name, value) for name, value in sorted(found.items()))


def miniature(config: PreTrainedConfig, low: Sequence[str], towers: bool = True) -> PreTrainedConfig:
    """A copy of a configuration with narrow widths and one or two layers of each kind.

    Args:
        low: names of the thresholds that become 20 (or stay, if lower); all others go beyond reach.
        towers: narrow the parts that read images and sound as well; else they only become one layer deep.
    """
    small = copy.deepcopy(config)
    if hasattr(small, "quantization_config"):
        del small.quantization_config
    text = small.get_text_config()
    for part in _parts(small):
        if part is text or part is small or towers:
            _narrow(part, low, one_layer=part is not text and part is not small)
        else:
            _set_layers(part, 1)
    return small


def _named_integers(name: str, value: Any) -> Iterator[tuple[str, int]]:
    """Names and values of the integers in a value of this name, in a dict by their keys."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _named_integers(str(key), inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _named_integers(name, inner)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and float(value).is_integer():
        yield name, int(value)


def _is_threshold(name: str) -> bool:
    return bool(_THRESHOLD.search(name)) and not _NO_THRESHOLD.search(name)


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A configuration and those inside it."""
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _layer_overrides(config: PreTrainedConfig) -> dict[int, Options]:
    """Layer -> attributes in which it differs from the configuration (transformers' per_layer_config, from 5.18 on)."""
    spec = vars(config).get("_heterogeneity_spec")
    return {} if spec is None else spec.per_layer_overrides


def _narrow(config: PreTrainedConfig, low: Sequence[str], one_layer: bool) -> None:
    overrides = _layer_overrides(config)
    if overrides:
        config.per_layer_config = None  # while it is set, transformers refuses to read these attributes
    chosen = _choose_layers(config, one_layer, overrides)
    counts = [value for name, value in vars(config).items() if _QUERY_HEADS.fullmatch(name) and isinstance(value, int)]
    heads = min(counts, default=0)  # of queries: with as many KV heads, each query head has one
    rotary = rotary_parameters(config)
    for parameters in rotary:
        _narrow_rope(config, parameters, low)
    for name, value in list(vars(config).items()):
        if not name.startswith("_") and isinstance(value, (int, float, list, tuple)):
            setattr(config, name, _narrowed(name, value, low, heads))
    _fit_mixers(config)
    if rotary and {"head_dim", "qk_rope_head_dim"} <= set(vars(config)):
        config.head_dim = _ROPE_DIM  # the width that the rotary embedding of MLA reads
    if overrides:
        config.per_layer_config = {
            # a layer's own head width stays different from the other layers'
            place: {
                n: 2 * _HEAD_DIM if n == "head_dim" else _narrowed(n, v, low, heads)
                for n, v in overrides[layer].items()
            }
            for place, layer in enumerate(chosen)
            if layer in overrides
        }


def _fit_mixers(config: PreTrainedConfig) -> None:
    """Make derived widths fit again: Mamba2 layers' heads, and Zamba's attention."""
    names = vars(config)
    for heads, width in _MAMBA_HEADS:
        if heads in names and width in names and (expand := names.get("mamba_expand", names.get("expand"))):
            inner = int(expand * config.hidden_size)
            setattr(config, width, inner // names[heads])
            if names.get("mamba_d_ssm") is not None:
                config.mamba_d_ssm = inner
    if "attention_hidden_size" in names and "attention_head_dim" in names:
        config.attention_hidden_size = 2 * config.hidden_size
        config.attention_head_dim = 2 * config.hidden_size // config.num_attention_heads


def _narrowed(name: str, value: Any, low: Sequence[str], heads: int) -> Any:
    """The value of an attribute of this name in a miniature."""
    if isinstance(value, (list, tuple)):
        return type(value)(_narrowed(name, inner, low, heads) for inner in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        return value
    if _is_threshold(name):
        return value if value < 1 else type(value)(min(value, _LOW) if name in low else _FAR)
    if not isinstance(value, int) or (value == 0 and not name.endswith("_token_id")):
        return value
    if _QUERY_HEADS.fullmatch(name):
        return _HEADS
    if _KV_HEADS.fullmatch(name):
        return _HEADS if value >= heads else min(value, 2)
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            return size
    for pattern, most in _MOST:
        if re.fullmatch(pattern, name):
            return min(value, most)
    return value


def _choose_layers(config: PreTrainedConfig, one_layer: bool, overrides: dict[int, Options]) -> list[int]:
    """Keep the first two layers of each kind, and return them.

    Layers are of one kind when all lists by layer agree on them. One of each kind comes first, so that layers which
    share the keys of an earlier one of their kind find it.
    """
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int) or one_layer or count < 2:
        _set_layers(config, 1 if one_layer else None)
        return [0]
    lists = {n: v for n, v in vars(config).items() if isinstance(v, (list, tuple)) and len(v) == count}
    places: dict[tuple[str, ...], list[int]] = {}
    for layer in range(count):
        kind = (*(str(values[layer]) for values in lists.values()), str(overrides.get(layer)))
        places.setdefault(kind, []).append(layer)
    chosen = [place[n] for n in (0, 1) for place in places.values() if len(place) > n][:_MOST_LAYERS]
    _set_layers(config, len(chosen))
    for name, values in lists.items():
        setattr(config, name, type(values)(values[layer] for layer in chosen))
    for name in ("mlp_only_layers", "moe_layers"):
        if name not in lists and isinstance(indices := getattr(config, name, None), (list, tuple)):
            setattr(config, name, type(indices)(i for i in indices if i < len(chosen)))
    return chosen


def _set_layers(config: PreTrainedConfig, count: int | None) -> None:
    for name, value in list(vars(config).items()):
        if _LAYER_COUNT.fullmatch(name) and isinstance(value, int):
            setattr(config, name, min(value, 2) if count is None else count)


def _narrow_rope(config: PreTrainedConfig, parameters: Options, low: Sequence[str]) -> None:
    """Fit a rotary embedding's parameters to the width of a miniature's heads."""
    if isinstance(parameters.get(_ROPE_THRESHOLD), (int, float)):
        # dynamic: requests end before it, see specdec.loading.sizes.max_model_len
        near = _ROPE_THRESHOLD in low and parameters.get("rope_type") != _BATCH_DEPENDENT_ROPE
        far = _FAR if parameters.get("rope_type") == "longrope" else MAX_POSITIONS  # Phi-3 names it a second time
        parameters[_ROPE_THRESHOLD] = min(int(parameters[_ROPE_THRESHOLD]), _LOW) if near else far
    width = _ROPE_DIM if "qk_rope_head_dim" in vars(config) else _HEAD_DIM
    partial = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    pairs = int(width * partial) // 2 if width == _HEAD_DIM else width // 2
    for name in ("short_factor", "long_factor"):
        if isinstance(factors := parameters.get(name), list):
            parameters[name] = (factors * pairs)[:pairs]
    if isinstance(sections := parameters.get("mrope_section"), list):
        shares = [max(section * pairs // sum(sections), 1) for section in sections]
        shares[0] += pairs - sum(shares)
        parameters["mrope_section"] = shares
