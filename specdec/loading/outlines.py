"""What a head needs to know of a target, from its files and without loading it; and which target a head names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig

from drafters.checkpoints.hub import is_hub_name
from drafters.checkpoints.tensor_files import CheckpointFolder, locate, open_folder
from drafters.eagle import target_of
from drafters.eagle3.checkpoint import TargetFacts
from drafters.mtp.checkpoint import has_mtp
from specdec.errors import ModelLoadError
from specdec.loading.builtin import BUILTIN_HEADS, builtin_name
from specdec.loading.checkpoint import check_target_folder, find_checkpoint
from specdec.loading.load_errors import loading_named

_EMBEDDINGS = ("embed_tokens.weight", "tok_embeddings.weight", "embeddings.weight", "wte.weight")
_OUTPUTS = ("lm_head.weight", "output.weight")


@dataclass(frozen=True)
class TargetOutline:
    """A target, unloaded.

    Attributes:
        name: hub name, or folder. architectures: of its config.json.
        facts: its sizes, embedding and lm_head.
    """

    name: str
    architectures: tuple[str, ...]
    facts: TargetFacts


def outline_target(name: str) -> TargetOutline:
    """Read a target's configuration and its two embeddings.

    Raises:
        ModelLoadError: it is missing or cannot be read, or its embeddings are stored under no name that is known.
        HeadLoadError: its files are damaged.
    """
    checkpoint = find_checkpoint(name)
    check_target_folder(checkpoint)
    with loading_named(checkpoint, "the target model"):
        config = AutoConfig.from_pretrained(checkpoint.path, **checkpoint.options)
    text = config.get_text_config()
    folder = open_folder(locate(checkpoint.path))
    embedding = _stored(folder, _EMBEDDINGS)
    if embedding is None:
        raise ModelLoadError(f"{name}: none of its tensors is an input embedding ({', '.join(_EMBEDDINGS)})")
    lm_head = _stored(folder, _OUTPUTS)
    facts = TargetFacts(
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_layers=text.num_hidden_layers,
        embedding=embedding,
        lm_head=embedding if lm_head is None else lm_head,
        model_type=text.model_type,
    )
    place = str(Path(checkpoint.path).resolve()) if checkpoint.is_folder else checkpoint.path
    return TargetOutline(place, tuple(config.architectures or ()), facts)


def _stored(folder: CheckpointFolder, endings: tuple[str, ...]) -> torch.Tensor | None:
    """The tensor of the shortest name with one of these endings."""
    for ending in endings:
        found = [name for name in folder.tensors if name == ending or name.endswith(f".{ending}")]
        if found:
            name = min(found, key=len)
            return folder.load([name])[name]
    return None


def target_of_head(head: str | Path) -> str | None:
    """The target that a head was made for, as its own files say: a built-in head's, the checkpoint that holds a
    module, or the one that config.json names. None where they do not.

    Args:
        head: folder, or hub name.

    Raises:
        HeadLoadError: the files cannot be read.
    """
    built_in = builtin_name(head)
    for target, own in BUILTIN_HEADS.items():
        if built_in == own:
            return target
    path = locate(head)
    if has_mtp(path):
        return str(head) if (path / "tokenizer_config.json").exists() else None
    return target_of(path)


def is_available(target: str) -> bool:
    """Whether a target lies on this machine: a built-in one, a folder, or a hub model in the local cache."""
    if builtin_name(target) is not None or os.path.isdir(os.path.expanduser(target)):
        return True
    return is_hub_name(target) and isinstance(try_to_load_from_cache(target, "config.json"), str)
