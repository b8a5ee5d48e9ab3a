"""What a head's own files say of its target, for whoever reads a head without one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from drafters.checkpoints.config_fields import lookup
from drafters.checkpoints.layouts import Layout, require
from drafters.eagle3.checkpoint import TargetFacts, open_head
from drafters.eagle3.formats import AUX_KEYS, flattened
from drafters.eagle3.overrides import USE_AUX, Eagle3Overrides
from drafters.errors import HeadLoadError

_NO_OVERRIDES = Eagle3Overrides()
STORED = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""Names of dtypes in safetensors."""


def target_of_files(path: str | Path, overrides: Eagle3Overrides = _NO_OVERRIDES) -> TargetFacts:
    """Facts of the target that the own files of an EAGLE head imply, with tensors of zeros that take no memory.

    The number of layers is a guess that no choice depends on: a head whose aux layers follow from it is refused.

    Raises:
        HeadLoadError: files are missing or of another kind, or the aux layers depend on the target.
    """
    opened = open_head(path)
    if opened.layout is not Layout.EAGLE1:
        require(opened.layout, Layout.EAGLE3, opened.folder.config, opened.names)
    folder, config = opened.folder.path, overrides.applied(flattened(opened.folder.config).config)
    sizes = {key: lookup(config, key) for key in ("hidden_size", "target_hidden_size", "vocab_size")}
    hidden, vocab = sizes["target_hidden_size"] or sizes["hidden_size"], sizes["vocab_size"]
    if type(hidden) is not int or type(vocab) is not int:
        raise HeadLoadError(f"{folder}: config.json has no hidden_size or no vocab_size: {sizes}")
    lists = [ids for key in AUX_KEYS if isinstance(ids := lookup(config, key), list) and ids]
    named = [i for ids in (*lists, overrides.aux_layers or ()) for i in ids if type(i) is int]
    reads_aux = opened.layout is not Layout.EAGLE1 and not any(lookup(config, key) is False for key in USE_AUX)
    if not named and reads_aux:
        raise HeadLoadError(
            f"{folder}: config.json names no aux layers, and their default depends on the target: give the target"
        )
    said = lookup(config, "num_hidden_layers")  # of many heads it is the target's
    layers = max(named, default=0) + 2
    zeros = torch.zeros(1, 1).expand(vocab, hidden)
    return TargetFacts(hidden, vocab, max(layers, said if type(said) is int else 0), zeros, zeros)


def stored_dtype(path: str | Path) -> torch.dtype:
    """Dtype of a head's weights on disk (of its final norm); float32 for any that is no plain one."""
    found: Mapping[str, str] = {name: info.dtype for name, info in open_head(path).folder.tensors.items()}
    dtype = next((found[name] for name in found if name.split(".")[-2:] == ["norm", "weight"]), "F32")
    plain = {**STORED, **{str(kind): kind for kind in STORED.values()}}  # and in pytorch_model.bin
    return plain.get(dtype, torch.float32)
