"""EAGLE-3 heads written for other engines: in the layout of speculators (vLLM) or of SpecForge (SGLang).

Both know fewer variants than `Eagle3Spec`. A head that a layout, or the engine that reads it, cannot express is refused
by the names of its fields; nothing is left out or approximated.
Source: vllm-project/speculators 0.9.0, speculators/models/eagle3/config.py and core.py; sgl-project/sglang 0.5.23,
sglang/srt/models/llama_eagle3.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from attention.backends.limits import dtype_name
from attention.errors import InvalidInputError
from drafters.base import FINAL_NORM
from drafters.checkpoints.config_fields import rope_to_config
from drafters.checkpoints.tensor_files import CheckpointPath, Json, StateDict, write_folder
from drafters.eagle3.checkpoint import maps_of, save_eagle3
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.layout import layer_sizes
from drafters.eagle3.spec import Eagle3Spec

ExportLayout = Literal["speculators", "specforge"]
LAYOUTS: tuple[ExportLayout, ...] = get_args(ExportLayout)
SPECULATORS_VERSION = "0.9.0"
"""The release whose layout is written."""
_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
"""Kinds that both engines compute as `drafters.rope` does."""
_ALWAYS = frozenset(
    {
        *("hidden_size", "target_hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"),
        *("vocab_size", "draft_vocab_size", "aux_layers", "rms_norm_eps", "rope", "num_layers"),
        *("input_norm", "fc_norm", "feedback", "own_embed", "own_lm_head"),
    }
)
"""Fields that both layouts express, with the exceptions of `_problems`."""
_MORE: Mapping[ExportLayout, frozenset[str]] = {
    "speculators": frozenset({"norm_before_residual", "qk_norm", "qkv_bias", "o_bias", "mlp_bias"}),
    "specforge": frozenset(),
}
"""Fields besides that one layout expresses. Any other field of the spec must have its default value."""
_UNWRITTEN = dict.fromkeys(("windowed_layers", "window"), "this export writes no sliding windows")
"""Fields for which a layout has a place, and that are not written."""


@dataclass(frozen=True)
class Verifier:
    """The target as a head's configuration names it, for engines that are given the head alone.

    Attributes:
        name_or_path: hub name or folder. architectures: from its config.json.
    """

    name_or_path: str
    architectures: tuple[str, ...]


def export_eagle3(
    head: Eagle3Head,
    folder: CheckpointPath,
    layout: ExportLayout,
    *,
    verifier: Verifier | None = None,
    dtype: torch.dtype | None = None,
    num_speculative_tokens: int = 5,
    with_target_tensors: bool = True,
) -> Path:
    """Write a head as config.json and model.safetensors of another project's layout.

    Args:
        layout: "speculators", which vLLM reads, or "specforge", which SGLang reads.
        verifier: the target; only the speculators layout names it, and needs it.
        dtype: for the stored weights; None keeps the head's.
        num_speculative_tokens: K that a speculators configuration proposes.
        with_target_tensors: write tensors shared with the target (embedding, lm_head) in the speculators layout, as
            that package does, which leaves missing tensors uninitialised. False: the file is smaller, and serves
            engines that share these tensors themselves (vLLM, this library). The specforge layout never has them.

    Returns:
        The folder.

    Raises:
        InvalidInputError: the layout cannot express the head (every field is named), a value is not allowed, or the
            folder cannot be written. Nothing was written then.
    """
    if layout not in LAYOUTS:
        raise InvalidInputError(f"layout={layout!r}: allowed are {', '.join(LAYOUTS)}")
    if num_speculative_tokens < 1:
        raise InvalidInputError(f"num_speculative_tokens={num_speculative_tokens}: give at least 1")
    problems = problems_of(head.spec, layout)
    if problems:
        raise InvalidInputError(f"this head cannot be written in the {layout} layout: " + "; ".join(problems))
    if layout == "specforge":
        return save_eagle3(head, made(folder), dtype)
    if verifier is None:
        raise InvalidInputError(
            "the speculators layout names the target that the head was made for: give its verifier, a hub name or a "
            "folder with its architectures"
        )
    stored = dtype or head.norm.weight.dtype
    tensors = _tensors(head, stored, with_target_tensors)
    return write_folder(made(folder), _config(head.spec, verifier, stored, num_speculative_tokens), tensors)


def shares_embedding(head: Eagle3Head, embedding: Tensor, stored: torch.dtype) -> bool:
    """Whether a head's own embedding is a copy of its target's, as the speculators layout has it.

    Args:
        embedding: [V, H] the target's. stored: dtype of the head's files, to which a copy of it was rounded.
    """
    own = head.embed_tokens.weight if head.spec.own_embed else None
    return own is not None and own.shape == embedding.shape and torch.equal(own, embedding.to(stored).to(own))


def problems_of(spec: Eagle3Spec, layout: ExportLayout) -> list[str]:
    """Fields of a head that the layout, or the engine that reads it, cannot express, with reasons; empty if it can."""
    known = _ALWAYS | _MORE[layout]
    problems = [
        f"{f.name} = {getattr(spec, f.name)!r} ({_UNWRITTEN.get(f.name, 'it has no place in it')})"
        for f in fields(spec)
        if f.name not in known and getattr(spec, f.name) != f.default
    ]
    if spec.rope.kind not in _ROPE_KINDS:
        problems.append(
            f"rope of type {spec.rope.kind!r} (computed differently there; known: {', '.join(_ROPE_KINDS)})"
        )
    return problems + [said for wrong, said in _RULES[layout] if wrong(spec)]


_Rule = tuple[Callable[[Eagle3Spec], bool], str]
_RULES: Mapping[ExportLayout, tuple[_Rule, ...]] = {
    "speculators": (
        (lambda spec: spec.aux_layers == (FINAL_NORM,), "aux_layers = the last state (its heads always have an fc)"),
        (
            lambda spec: spec.input_norm and spec.fc_norm,
            "input_norm and fc_norm together (its configuration forbids it)",
        ),
        (
            lambda spec: spec.target_hidden_size != spec.hidden_size,
            "target_hidden_size other than hidden_size (its fc reads states of the head's own width)",
        ),
        (
            lambda spec: spec.qkv_bias != spec.o_bias,
            "qkv_bias without o_bias, or the reverse (its attention_bias means both)",
        ),
        (
            lambda spec: spec.qk_norm and spec.mlp_bias,
            "qk_norm and mlp_bias together (its qwen3 layers have no biases in the MLP)",
        ),
    ),
    "specforge": (
        (
            lambda spec: spec.own_embed and spec.target_hidden_size == spec.hidden_size,
            "own_embed (SGLang replaces it by the target's embedding where both are of one width)",
        ),
        (
            lambda spec: spec.has_fc and spec.aux_size == spec.hidden_size,
            "one aux layer of the head's own width (SGLang tells by the width whether a state goes through fc)",
        ),
    ),
}
"""Combinations of fields that a layout cannot express, with the messages."""


def _tensors(head: Eagle3Head, dtype: torch.dtype, with_target_tensors: bool) -> StateDict:
    shared = {"embed_tokens.weight": head.target_embedding, "lm_head.weight": head.target_lm_head}
    given = {name: t for name, t in shared.items() if t is not None} if with_target_tensors else {}
    # clone: safetensors refuses tensors that share memory, as a tied embedding and lm_head do.
    weights = {name: t.detach().to("cpu", dtype).clone() for name, t in (head.state_dict() | given).items()}
    renamed = {name.replace("midlayer.", "layers.0."): t for name, t in weights.items()}
    if head.draft_vocab_size == head.spec.vocab_size:
        return renamed  # with the whole vocabulary the package has no maps, and reports them as unexpected
    return renamed | maps_of(head)


def _config(spec: Eagle3Spec, verifier: Verifier, dtype: torch.dtype, num_speculative_tokens: int) -> Json:
    """config.json in the layout of speculators; every value is written, also where it is the default of a class."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "dtype": dtype_name(dtype),
        "draft_vocab_size": spec.draft_vocab_size,
        "target_hidden_size": None,  # same as the head's: `problems_of` refuses others
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.input_norm,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.feedback == "post_norm",
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(spec.aux_layers),  # numbered as in specdec
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_config(spec),
        "speculators_config": speculators_config("eagle3", verifier, num_speculative_tokens),
    }


def speculators_config(kind: str, verifier: Verifier, num_speculative_tokens: int) -> Json:
    """What every speculators configuration holds of the same name: kind of head, target and K."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": verifier.name_or_path, "architectures": list(verifier.architectures)},
    }


def _layer_config(spec: Eagle3Spec) -> Json:
    rope = rope_to_config(spec.rope)
    config = {
        "model_type": "qwen3" if spec.qk_norm else "llama",
        **layer_sizes(spec),
        "max_position_embeddings": rope["max_position_embeddings"],
        "rope_parameters": rope["rope_parameters"],
        "attention_bias": spec.qkv_bias,
        "pad_token_id": None,  # the package gives a padding token no embedding
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    if not spec.qk_norm:
        config["mlp_bias"] = spec.mlp_bias
    return config


def made(folder: CheckpointPath) -> Path:
    """The folder, made where it is missing. Raises InvalidInputError: it cannot be written."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"cannot write to the folder {path}: {error}; give another one") from error
    if not os.access(path, os.W_OK):
        raise InvalidInputError(f"cannot write to the folder {path}: no permission; give another one")
    return path
