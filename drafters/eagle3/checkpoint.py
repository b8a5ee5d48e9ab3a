"""Load and save EAGLE-3 heads, strictly, with the source of every choice; or read what a head implies of its target."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attention.backends.limits import dtype_name
from drafters.base import TargetFacts
from drafters.checkpoints.config_fields import (
    HeadReport,
    ResolvedField,
    lookup,
    unread_fields,
)
from drafters.checkpoints.layer_fields import EMBEDDING
from drafters.checkpoints.layouts import Layout, detect, detect_by_config, require, strip_prefixes
from drafters.checkpoints.opened_head import OpenedHead
from drafters.checkpoints.tensor_files import (
    CheckpointFolder,
    CheckpointPath,
    Names,
    StateDict,
    locate,
    naming,
    open_folder,
    read_json,
    write_folder,
)
from drafters.eagle3.formats import AUX_KEYS, flattened, format_of
from drafters.eagle3.head import Eagle1Head, Eagle3Head, SharingHead
from drafters.eagle3.layout import (
    canonical_names,
    resolve_eagle1,
    resolve_spec,
    rotary_buffers,
    spec_to_config,
)
from drafters.eagle3.overrides import KEYS, USE_AUX, Eagle3Overrides
from drafters.eagle3.spec import Eagle1Spec, Eagle3Spec
from drafters.errors import HeadLoadError
from drafters.vocab import mask_of, most_frequent, offsets_of

_NO_OVERRIDES = Eagle3Overrides()


def load_eagle(
    path: CheckpointPath,
    target: TargetFacts,
    dtype: torch.dtype,
    device: torch.device | str,
    overrides: Eagle3Overrides = _NO_OVERRIDES,
) -> Eagle3Head:
    """Load an EAGLE-3 head in any of the layouts of `drafters.eagle3.formats`, or an EAGLE-1 or EAGLE-2 head, ready for
    inference on the target's device.

    Args:
        path: a folder, or a model's name on the Hugging Face hub.
        target: the model that the head will draft for; its tensors are shared, not copied.
        dtype, device: for the head's weights, usually the target's. overrides: choices that replace the
            configuration's; of an EAGLE-1 head, keys of config.json alone.

    Raises:
        HeadLoadError: files are missing, tensors are missing, unknown, of another shape or not finite, the layout is
            another one, or the configuration contradicts itself or the tensors.
        HeadMismatchError: the head was made for another target.
    """
    return _open(path, target, overrides).loaded(dtype, device)


def describe_eagle(path: CheckpointPath, target: TargetFacts, overrides: Eagle3Overrides = _NO_OVERRIDES) -> HeadReport:
    """Resolve a head without loading its weights (the target's tensors may be on "meta").

    Raises:
        HeadLoadError, HeadMismatchError: as `load_eagle`, except for what only the values show.
    """
    return _open(path, target, overrides).report


def save_eagle3(head: Eagle3Head, folder: CheckpointPath, dtype: torch.dtype | None = None) -> Path:
    """Write config.json and model.safetensors in the layout that SGLang, vLLM and `load_eagle` read; returns the
    folder.

    Tensors shared with the target are not written; d2t and t2d always are. dtype: for the stored weights; None keeps
    the head's.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored = dtype or head.norm.weight.dtype
    # safetensors stores contiguous tensors only, and no two that share memory: hence also the clone below.
    weights = {name: t.detach().to("cpu", stored).contiguous() for name, t in head.state_dict().items()}
    # Pre-attention norms of further layers; SGLang reads them as `hidden_norm`, vLLM as `input_layernorm`.
    deep = [name for name in weights if name.startswith("layers.") and "input_layernorm" in name]
    weights |= {name.replace("input_layernorm", "hidden_norm"): weights[name].clone() for name in deep}
    config = spec_to_config(head.spec, dtype_name(stored))
    return write_folder(folder, config, weights | maps_of(head))


def maps_of(head: SharingHead) -> StateDict:
    """Both maps of a head's draft vocabulary, as files have them."""
    d2t = offsets_of(head.target_ids).cpu()
    return {"d2t": d2t, "t2d": mask_of(d2t, head.spec.vocab_size)}


def check_kind(path: CheckpointPath) -> Path:
    """Refuse a head whose config.json names a kind that no loader here reads; return the folder of any other.

    Call it before looking for weights: some kinds keep them in other files.

    Raises:
        HeadLoadError: the kind is not supported, or config.json cannot be read.
    """
    folder = locate(path)
    config = read_json(folder / "config.json")
    found = detect_by_config(config)
    if found is not None:
        with naming(folder):
            require(found, Layout.EAGLE3, config, ())
    return folder


class HeadFolder(NamedTuple):
    """An opened folder, and the family of its tensors.

    names: names without wrappers' prefixes -> in the files. stray: stored rotary buffers, which are not read.
    """

    folder: CheckpointFolder
    layout: Layout
    names: Names
    stray: list[str]


def open_head(path: CheckpointPath) -> HeadFolder:
    """Open a head's folder and detect its family.

    Raises:
        HeadLoadError: it cannot be read, or its config.json names a kind that no loader here reads.
    """
    folder = open_folder(check_kind(path))
    stray = rotary_buffers(folder.tensors)
    short = strip_prefixes(name for name in folder.tensors if name not in stray)
    layout = detect(folder.config, folder.shapes(short))
    return HeadFolder(folder, layout, short, stray)


def _open(path: CheckpointPath, target: TargetFacts, overrides: Eagle3Overrides) -> OpenedHead[Eagle3Spec, Eagle3Head]:
    found = open_head(path)
    with naming(found.folder.path):
        opened = _resolved(found, target, overrides)
        opened.check()
    return opened


def _resolved(found: HeadFolder, target: TargetFacts, overrides: Eagle3Overrides) -> OpenedHead[Eagle3Spec, Eagle3Head]:
    folder = found.folder
    config = found.folder.config
    written = format_of(config)
    names = canonical_names(found.names, written.deep_norm)
    shapes = folder.shapes(names)
    spec: Eagle3Spec
    ignored = {"ignored tensors": (found.stray, "rotary buffers: they follow from the configuration")}
    if found.layout is Layout.EAGLE1:
        unread = [names.pop(EMBEDDING)] if EMBEDDING in names else []
        reason = "the target's embedding is read in its place, as the reference code does"
        ignored["ignored embedding"] = (unread, reason)
        spec, fields = resolve_eagle1(config, shapes, target, overrides)
        kind = "EAGLE-1/2, SafeAILab"
        names = {re.sub(r"^midlayer\.", "layers.0.", parameter): full for parameter, full in names.items()}
    else:
        require(found.layout, Layout.EAGLE3, config, found.names)
        spec, fields = resolve_spec(config, shapes, target, overrides)
        kind = f"EAGLE-3, {written.name}"
    nested = () if written.layer_config is None else (f"{written.layer_config}.{key}" for key in KEYS)
    chosen = found.layout is Layout.EAGLE1 or overrides.aux_layers is not None
    fields += unread_fields(config, {*KEYS, *nested}, layers_are_chosen=chosen)
    fields += tuple(ResolvedField(name, ", ".join(own), reason) for name, (own, reason) in ignored.items() if own)
    return OpenedHead(folder, f"{kind} layout", names, spec, fields, partial(_new_head, spec, target))


def _new_head(spec: Eagle3Spec, target: TargetFacts, d2t: Tensor | None, device: str = "meta") -> Eagle3Head:
    """The head with torch's own weights, sharing the target's tensors (a padded embedding is cut, not copied)."""
    embedding = target.embedding[: spec.vocab_size]
    lm_head = target.lm_head[: spec.draft_vocab_size]
    kind = Eagle1Head if isinstance(spec, Eagle1Spec) else Eagle3Head
    return kind(spec, embedding, lm_head, d2t, torch.device(device))


STORED = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""Names of dtypes in safetensors."""


def target_of_files(path: CheckpointPath, overrides: Eagle3Overrides) -> TargetFacts:
    """Facts of the target that the own files of an EAGLE head imply, with tensors of zeros that take no memory.

    The number of layers is a guess that no choice depends on: a head whose aux layers follow from it is refused.

    Raises:
        HeadLoadError: files are missing or of another kind, or the aux layers depend on the target.
    """
    opened = open_head(path)
    if opened.layout is not Layout.EAGLE1:
        require(opened.layout, Layout.EAGLE3, opened.folder.config, opened.names)
    folder = opened.folder.path
    config = overrides.applied(flattened(opened.folder.config))
    sizes = {key: lookup(config, key) for key in ("hidden_size", "target_hidden_size", "vocab_size")}
    hidden = sizes["target_hidden_size"] or sizes["hidden_size"]
    vocab = sizes["vocab_size"]
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


def stored_dtype(path: CheckpointPath) -> torch.dtype:
    """Dtype of a head's weights on disk (of its final norm); float32 for any that is no plain one."""
    found = {name: info.dtype for name, info in open_folder(path).tensors.items()}
    dtype = next((found[name] for name in found if name.split(".")[-2:] == ["norm", "weight"]), "F32")
    plain = {**STORED, **{str(kind): kind for kind in STORED.values()}}  # and in pytorch_model.bin
    return plain.get(dtype, torch.float32)


def fresh_eagle3(spec: Eagle3Spec, target: TargetFacts, counts: Tensor, seed: int) -> Eagle3Head:
    """A head with random float32 weights on the target's device; its lm_head starts as the target's rows.

    counts: [V] how often the target wrote each token; the draft vocabulary is the most frequent Vd of them.

    Raises:
        HeadMismatchError, InvalidInputError: spec and target do not fit.
    """
    d2t = most_frequent(counts, spec.draft_vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = _new_head(spec, target, d2t, "cpu")
    head.to(target.embedding.device)
    if spec.own_lm_head and spec.hidden_size == target.hidden_size:
        with torch.no_grad():
            head.lm_head.weight.copy_(target.lm_head[head.target_ids])
    return head
