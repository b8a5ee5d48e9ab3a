"""Keys of a head's config.json that nothing here reads: none of them may decide how a head computes, unseen.

Configurations carry what a class of transformers always writes, what was copied from the target, and what an exporter
newer than this file adds. The first is left out of reports; the others are named there with their values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from drafters.checkpoints.config_fields import Config, Field
from drafters.errors import HeadLoadError

UNKNOWN = "unknown keys"
"""Name of the field that holds what nobody here has heard of."""

_ALWAYS = re.compile(
    r"architectures|auto_map|model_type|(_?name_or_path)|_commit_hash|transformers_version|torch_dtype|dtype"
    r"|(bos|eos|pad|sep|unk|cls|decoder_start|forced_bos|forced_eos)_token_id|use_cache|initializer_range"
    r"|\w*dropout|pretraining_tp|tie_word_embeddings|tie_encoder_decoder|max_window_layers|is_(encoder_)?decoder"
    r"|is_encoder_decoder|id2label|label2id|problem_type|finetuning_task|task_specific_params|return_dict(_in_generate)?"
    r"|output_(attentions|hidden_states|scores)|pruned_heads|cross_attention_hidden_size|add_cross_attention|torchscript"
    r"|chunk_size_feed_forward|prefix|tokenizer_class|use_bfloat16|tf_legacy_loss|_attn_implementation\w*|num_return_sequences"
    r"|(min|max)_length|do_sample|early_stopping|num_beams|num_beam_groups|diversity_penalty|temperature|top_k|top_p"
    r"|typical_p|repetition_penalty|(encoder_)?no_repeat_ngram_size|length_penalty|bad_words_ids|remove_invalid_values"
    r"|exponential_decay_length_penalty|suppress_tokens|begin_suppress_tokens|quantization|_notes"
)
"""What transformers writes of any model, and of generation."""
_EXPORTERS = re.compile(
    r"eagle_config|transformer_layer_config|speculators_\w+|embed_requires_grad|target_model_type|target_model\w*"
    r"|draft_num_hidden_layers|step_loss_decay|eagle_config\.(use_last_layernorm|next_layer_regular"
    r"|use_input_layernorm_in_first_layer|parallel_draft_heads_num_layers|eagle_\w*loss\w*|eagle_decoder_type)"
    r"|num_target_layers|ttt_length|ttt_steps|loss_\w+"
)
"""What exporters write that is looked at elsewhere, names another thing than the head, or is of training alone."""
_TARGETS = re.compile(
    r"\w*expert\w*|\w*moe\w*|\w*router\w*|decoder_sparse_step|mlp_only_layers|norm_topk_prob|(q|kv|o)_lora_rank"
    r"|(qk_nope|qk_rope|v|qk)_head_dim|first_k_dense_replace|n_group|topk_\w+|scoring_func|aux_loss_alpha|seq_aux|ep_size"
    r"|scale_(emb|depth)|\w+_scaling_factor|dim_model_base|\w*_multiplier|logits?_scal\w+|\w*softcap\w*|query_pre_attn_scalar|\w*_pattern"
    r"|rope_(interleave\w*|local_base_freq)|num_nextn_predict_layers|mtp_\w+|num_mtp_layers|attention_chunk_size"
    r"|no_rope_\w+|attn_\w+|index_\w+|layernorm_epsilon|layer_norm_eps\w*|norm_eps|vision_config|text_config|\w+_token_id"
    r"|\w+_token_index|qk_layernorm|block_size|head_dim_\w+"
)
"""What layers of targets have and an EAGLE head's do not: copied from the target, read by no engine of a head."""
_LAYER_LIST = re.compile(r"\w*(layer_ids|aux_layers|layers_to_capture)")


def unread_fields(config: Config, known: Collection[str], layers_are_chosen: bool = True) -> tuple[Field, ...]:
    """Report the keys that decide nothing, with their values.

    Args:
        config: config.json as read. known: keys that are read, dotted where they are nested.
        layers_are_chosen: whether lists of layers in the file need not be understood.

    Raises:
        HeadLoadError: one of them lists layers in a spelling that is not known, and no other key does.
    """
    unread = {key: value for key, value in _flat(config) if key not in known and value not in (None, False, [], {})}
    listed = [key for key in unread if _LAYER_LIST.fullmatch(_last(key))]
    understood = [key for key, value in _flat(config) if key in known and value and _LAYER_LIST.fullmatch(_last(key))]
    if listed and not understood and not layers_are_chosen:
        raise HeadLoadError(
            f"config.json says {_said(unread, listed)}: whether these are layers whose output is read or boundaries is "
            "not known of this key; choose by head_overrides, as aux_layers=[2, 16, 29] (boundaries)"
        )
    told = {key: value for key, value in unread.items() if not _is(_ALWAYS, key) and not _is(_EXPORTERS, key)}
    targets = [key for key in told if _is(_TARGETS, key)]
    unknown = [key for key in told if key not in targets]
    found = []
    if targets:
        found.append(
            Field("keys of a target", _said(told, targets), "config.json: no engine reads them of an EAGLE head")
        )
    if unknown:
        found.append(Field(UNKNOWN, _said(told, unknown), "config.json: nothing here knows them; they change nothing"))
    return tuple(found)


def _flat(config: Config) -> list[tuple[str, Any]]:
    """Keys at the top and in the objects that exporters make."""
    nested = ("eagle_config", "transformer_layer_config")
    inner = [(f"{key}.{name}", value) for key in nested for name, value in _object(config, key).items()]
    return [*config.items(), *inner]


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _object(config: Config, key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _is(kind: re.Pattern[str], key: str) -> bool:
    """Whether a key is of a kind; those of the decoder layer's own object are those of any configuration."""
    return kind.fullmatch(key.removeprefix("transformer_layer_config.")) is not None


def _said(values: Mapping[str, Any], keys: Collection[str]) -> str:
    return ", ".join(f"{key} = {_short(values[key])}" for key in sorted(keys))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
