"""The fields that heads of several families have in config.json, checked against the target."""

from __future__ import annotations

from drafters.base import TargetFacts
from drafters.checkpoints.config_fields import Config, ResolvedField, Shapes, by_presence, lookup, read
from drafters.errors import HeadLoadError, HeadMismatchError

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"


def refuse_quantised(config: Config, kind: str) -> None:
    """Refuse quantised weights and other activations than silu. kind: of the head, for messages.

    Raises:
        HeadLoadError: one of them.
    """
    if lookup(config, "quantization_config") is not None:
        raise HeadLoadError(f"quantised {kind} heads are not supported (config.json has quantization_config)")
    activation = read(config, "activation", str, "hidden_act", "hidden_activation", default="silu").value
    if activation != "silu":
        raise HeadLoadError(f"{kind} heads use the activation silu, config.json says {activation!r}")


def size_fields(config: Config, target: TargetFacts) -> list[ResolvedField]:
    """Widths, heads and vocabulary of a head, checked against its target.

    Raises:
        HeadMismatchError: made for a target of another hidden size or vocabulary.
        HeadLoadError: a size is missing or no number.
    """
    hidden = read(config, "hidden_size", int)
    target_hidden = or_other(config, "target_hidden_size", hidden)
    if target_hidden.value != target.hidden_size:
        raise HeadMismatchError(
            f"the head was made for a target of hidden size {target_hidden.value}, this target has {target.hidden_size}"
        )
    vocab = read(config, "vocab_size", int)
    if vocab.value not in (target.vocab_size, len(target.embedding)):  # of some targets it is padded, and counted so
        raise HeadMismatchError(
            f"the head was made for a vocabulary of {vocab.value} tokens, this target has {target.vocab_size}"
        )
    is_llama4 = lookup(config, "model_type") == "llama4_text"
    mlp_key = "intermediate_size_mlp" if is_llama4 else "intermediate_size"
    heads = read(config, "num_heads", int, "num_attention_heads")
    head_dim = hidden.value // max(heads.value, 1)
    return [
        hidden,
        target_hidden,
        vocab,
        read(config, "intermediate_size", int, mlp_key),
        heads,
        or_other(config, "num_kv_heads", heads, "num_key_value_heads"),
        read(config, "head_dim", int, default=head_dim, default_source="default: hidden_size / num_heads"),
    ]


def or_other(config: Config, name: str, other: ResolvedField, *keys: str) -> ResolvedField:
    """The value of one of these keys, else that of another field."""
    return read(config, name, int, *keys, default=other.value, default_source=f"default: {other.name}")


def vocabulary_fields(config: Config, shapes: Shapes) -> tuple[ResolvedField, ResolvedField, ResolvedField]:
    """The draft vocabulary, and whether the head brings its own embedding and lm_head; shapes: by parameter.

    Raises:
        HeadLoadError: a reduced draft vocabulary without an lm_head.
    """
    # tie_word_embeddings is not read: it is copied from the target's config.json, and the tensor decides.
    vocab = read(config, "vocab_size", int)
    draft = or_other(config, "draft_vocab_size", vocab)
    if LM_HEAD not in shapes and draft.value != vocab.value:
        raise HeadLoadError(f"missing: lm_head.weight [{draft.value}, hidden size] (the draft vocabulary is reduced)")
    return draft, by_presence({}, shapes, "own_embed", EMBEDDING), by_presence({}, shapes, "own_lm_head", LM_HEAD)
