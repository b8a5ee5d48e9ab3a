"""Load block-parallel heads, strictly, with the source of every choice; or resolve one by its own files."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from drafters.base import TargetFacts
from drafters.block.formats import flattened, format_of, resolve_block
from drafters.block.head import BlockParallelHead
from drafters.block.spec import BlockSpec
from drafters.checkpoints.config_fields import HeadReport, lookup, read
from drafters.checkpoints.layouts import strip_prefixes
from drafters.checkpoints.opened_head import OpenedHead
from drafters.checkpoints.tensor_files import CheckpointPath, locate, naming, open_folder, read_json


def load_block(
    path: CheckpointPath, target: TargetFacts, dtype: torch.dtype, device: torch.device | str
) -> BlockParallelHead:
    """Load a head for a target, whose tensors are shared, not copied, ready for inference.

    Raises:
        HeadLoadError: files are missing, tensors are missing, unknown, of another shape or not finite, the class is
            not supported, or the configuration has unknown keys, contradicts itself or the tensors.
        HeadMismatchError: the head was made for another target.
    """
    opened = _open(path, target)
    return opened.loaded(partial(_new_head, opened.spec, target), dtype, device)


def describe_block(path: CheckpointPath) -> HeadReport:
    """Resolve a head by its own files. Raises the errors of `load_block`, but for what only values show."""
    return _open(path, _target_of_files(path)).report


def _open(path: CheckpointPath, target: TargetFacts) -> OpenedHead[BlockSpec]:
    folder_path = locate(path)
    with naming(folder_path):
        written = format_of(read_json(folder_path / "config.json"))  # first: others keep weights in other files
        folder = open_folder(folder_path)
        names = strip_prefixes(folder.tensors)
        spec, fields = resolve_block(folder.config, folder.shapes(names), target)
        opened = OpenedHead(folder, f"{written.name} layout", names, spec, fields)
        opened.check(partial(_new_head, spec, target))
    return opened


def _new_head(spec: BlockSpec, target: TargetFacts, d2t: Tensor | None) -> BlockParallelHead:
    """The head without weights, sharing the target's tensors (a padded embedding is cut, not copied)."""
    embedding, lm_head = target.embedding[: spec.vocab_size], target.lm_head[: spec.draft_vocab_size]
    return BlockParallelHead(spec, embedding, lm_head, d2t, torch.device("meta"))


def _target_of_files(path: CheckpointPath) -> TargetFacts:
    """The target that the files imply, with tensors of zeros that take no memory. Raises HeadLoadError: they do not."""
    folder = locate(path)
    with naming(folder):
        config = flattened(read_json(folder / "config.json"))
        vocab, hidden = (read(config, key, int).value for key in ("vocab_size", "hidden_size"))
        ids = lookup(config, "target_layer_ids")
        least = max(ids) + 2 if isinstance(ids, list) and ids and all(type(i) is int for i in ids) else None
        layers = read(config, "num_target_layers", int, default=least).value
    zeros = torch.zeros(1, 1).expand(vocab, hidden)
    return TargetFacts(hidden, vocab, layers, zeros, zeros)
