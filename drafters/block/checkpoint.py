"""Load and save block-parallel heads, strictly, with the source of every choice; or resolve one by its own files."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from attention.backends.limits import dtype_name
from drafters.base import TargetFacts
from drafters.block.formats import flattened, format_of, resolve_block
from drafters.block.head import BlockParallelHead
from drafters.block.spec import BlockSpec
from drafters.checkpoints.config_fields import HeadReport, lookup, read, rope_to_config
from drafters.checkpoints.layer_fields import EMBEDDING, LM_HEAD
from drafters.checkpoints.layouts import strip_prefixes
from drafters.checkpoints.opened_head import OpenedHead
from drafters.checkpoints.tensor_files import (
    CheckpointPath,
    Json,
    Names,
    locate,
    naming,
    open_folder,
    read_json,
    write_folder,
)
from drafters.eagle3.layout import layer_sizes

_TRANSFORMERS = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


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


def fresh_block(spec: BlockSpec, target: TargetFacts, seed: int) -> BlockParallelHead:
    """A head with random float32 weights on the target's device, which shares the target's embedding and lm_head.

    Raises HeadMismatchError: spec and target do not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _new_head(spec, target, None, "cpu").to(target.embedding.device)


def save_block(head: BlockParallelHead, folder: str | Path, num_target_layers: int, num_anchors: int) -> Path:
    """Write config.json and model.safetensors; returns the folder.

    A plain head that fills in has z-lab's layout, without the target's embedding and lm_head. Others have DeepSpec's,
    with copies of both, and say how many anchors they were trained with.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored = head.norm.weight.dtype
    weights = head.state_dict()
    if _is_deepspec(head.spec):
        weights = {EMBEDDING: head.target_embedding, LM_HEAD: head.target_lm_head, **weights}
    # Clones: safetensors stores no two tensors that share memory, as those of a tied target do.
    tensors = {name: t.detach().to("cpu", stored).contiguous().clone() for name, t in weights.items() if t is not None}
    return write_folder(folder, config_of(head.spec, num_target_layers, num_anchors, dtype_name(stored)), tensors)


def config_of(spec: BlockSpec, num_target_layers: int, num_anchors: int, dtype: str) -> Json:
    """config.json of a trained head, which has neither windows nor causal layers; dtype: of the stored weights."""
    deepspec = _is_deepspec(spec)
    own = {
        "target_layer_ids": [layer - 1 for layer in spec.aux_layers],
        "mask_token_id": spec.mask_token_id,
        "sample_from_anchor": spec.slots == "anchor-first",
    }
    dspark = {
        **own,
        "num_anchors": num_anchors,
        "markov_rank": spec.markov_rank,
        "markov_head_type": spec.markov or "vanilla",
        "enable_confidence_head": False,
    }
    return {
        "architectures": ["Qwen3DSparkModel" if deepspec else "DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": dtype,
        **layer_sizes(spec),
        "num_target_layers": num_target_layers,
        "block_size": spec.block_size,
        "attention_bias": False,
        "tie_word_embeddings": False,
        **rope_to_config(spec.rope),
        **(dspark if deepspec else {"dflash_config": own}),
    }


def _open(path: CheckpointPath, target: TargetFacts) -> OpenedHead[BlockSpec]:
    folder_path = locate(path)
    with naming(folder_path):
        written = format_of(read_json(folder_path / "config.json"))  # first: others keep weights in other files
        folder = open_folder(folder_path)
        names = _of_modules(strip_prefixes(folder.tensors))
        spec, fields = resolve_block(folder.config, folder.shapes(names), target)
        opened = OpenedHead(folder, f"{written.name} layout", names, spec, fields)
        opened.check(partial(_new_head, spec, target))
    return opened


def _of_modules(names: Names) -> Names:
    """Names with those of codebooks as of embeddings, whose `.weight` published files leave out, and transformers' own
    as of the others."""
    bare = {name: f"{name}.weight" for name in names if name.endswith("_codebook") and f"{name}.weight" not in names}
    return {(_TRANSFORMERS | bare).get(name, name): full for name, full in names.items()}


def _new_head(spec: BlockSpec, target: TargetFacts, d2t: Tensor | None, device: str = "meta") -> BlockParallelHead:
    """The head with torch's own weights, sharing the target's tensors (a padded embedding is cut, not copied)."""
    embedding, lm_head = target.embedding[: spec.vocab_size], target.lm_head[: spec.draft_vocab_size]
    return BlockParallelHead(spec, embedding, lm_head, d2t, torch.device(device))


def _target_of_files(path: CheckpointPath) -> TargetFacts:
    """The target that the files imply, with tensors of zeros that take no memory. Raises HeadLoadError: they do not."""
    folder = locate(path)
    with naming(folder):
        config = flattened(read_json(folder / "config.json"))
        vocab, hidden = (read(config, key, int).value for key in ("vocab_size", "hidden_size"))
        ids = lookup(config, "target_layer_ids") or lookup(config, "aux_hidden_state_layer_ids")
        least = max(ids) + 2 if isinstance(ids, list) and ids and all(type(i) is int for i in ids) else None
        layers = read(config, "num_target_layers", int, default=least).value
    zeros = torch.zeros(1, 1).expand(vocab, hidden)
    return TargetFacts(hidden, vocab, layers, zeros, zeros)


def _is_deepspec(spec: BlockSpec) -> bool:
    return spec.markov is not None or spec.slots == "anchor-first"
