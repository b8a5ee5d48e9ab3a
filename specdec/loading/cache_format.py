"""How the target's keys, values and recurrent states are stored: dtype, order in a page, scales of an 8-bit cache.

Calibrated scales that a checkpoint brings are read for `kv_cache_dtype="fp8"`, and shown.

A scale is the largest magnitude seen, over 448, so that x / scale fits e4m3, as in `KVFormat`.

    where it is declared                                         names of the tensors, below `…layers.N.`
    compressed-tensors: quantization_config.kv_cache_scheme      self_attn.k_scale, self_attn.v_scale; in older files
                                                                 self_attn.k_proj.output_scale, v_proj.output_scale
    ModelOpt: hf_quant_config.json, kv_cache_quant_algo          self_attn.k_proj.k_scale, self_attn.v_proj.v_scale

Source: the same names in vllm/model_executor/model_loader/weight_utils.py, `maybe_remap_kv_scale_name`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isclose
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.utils import cached_file

from attention.backends.base import AttentionBackend, PrefersLayout
from attention.cache.kv_cache import FP8, KVFormat, KVLayout
from drafters.checkpoints.config_fields import lookup
from drafters.checkpoints.tensor_files import CheckpointFolder, open_folder, read_json
from specdec.config import state_slots
from specdec.errors import HeadLoadError, InvalidInputError, ModelLoadError
from specdec.loading.checkpoint import Checkpoint
from specdec.loading.quantisation import MODELOPT_FILE, numbers_in_words
from specdec.loading.sizes import Rows
from specdec.options import LoadOptions
from specdec.values import short
from specdec.wrapped.probing import TargetProbe

if TYPE_CHECKING:
    from attention.recurrence.states import StateGroup

Pair = tuple[float, float]
"""Scale of keys, scale of values."""
_NAME = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.\w+\.(?:"
    r"(?P<own>[kv])_scale|(?P<proj>[kv])_proj\.(?:(?P=proj)_scale|output_scale)|(?P<both>kv)_scale)$"
)
_NOT_TEXT = re.compile(r"vision|visual|audio|image|mtp")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_SAME = 1e-5
STORED = {"auto": None, "fp8": FP8}
"""The dtypes of caches by their names, None for the model's."""


def kv_format(checkpoint: Checkpoint | None, probed: TargetProbe, options: LoadOptions) -> KVFormat:
    """How the target's keys and values are stored; the head's single layer always keeps the dtype of the model.

    kv_cache_dtype: "auto" is the dtype of the model, "fp8" is e4m3 with static scales: those of the checkpoint, see
    `chosen_scales`, else (scale of keys, scale of values) of each layer as given, or 1.0 everywhere.

    Raises:
        InvalidInputError: scales without fp8, scales that are none, or a cache in 8 bits for a target without
            one. Others: see `chosen_scales`.
    """
    dtype = options.kv_cache_dtype
    scales = options.kv_cache_scales
    source = ""
    if dtype == "fp8":
        scales, source = chosen_scales(checkpoint, probed, scales)
    format = KVFormat(STORED[dtype], tuple(scales or ()), source)
    if format.dtype is not None and not probed.calls:
        raise InvalidInputError(
            f"kv_cache_dtype='fp8': no layer of {type(probed.model).__name__} attends, so it has no KV cache; give "
            "'auto' (states of recurrent layers are float32)"
        )
    return format


def state_group(probed: TargetProbe, rows: Rows, dtype: str, in_order: bool) -> StateGroup | None:
    """The states of a target's recurrent layers, of all rows; None without such layers.

    dtype: a name among `specdec.config.STATE_DTYPES`. in_order: for a batch-invariant backend, see `StateGroup`.

    Raises:
        InvalidInputError: half precision for a target without such layers, in float32, or with such a backend.
    """
    if dtype != "float32" and (not probed.recurrent_calls or probed.model.dtype == torch.float32):
        what = "is in float32" if probed.recurrent_calls else "has no recurrent layer"
        raise InvalidInputError(
            f"recurrent_state_dtype={dtype!r}: {type(probed.model).__name__} {what}; give 'float32', or leave it out"
        )
    if not probed.recurrent_calls:
        return None
    if dtype != "float32" and in_order:
        raise InvalidInputError(
            f"recurrent_state_dtype={dtype!r} rounds states where rounds end: not with backend='batch_invariant'; give "
            "'float32', or use backend='auto'"
        )
    from attention.recurrence.states import StateGroup

    slots = state_slots(rows.max_num_seqs)
    return StateGroup(probed.recurrence_specs, slots, rows.num_speculative_tokens, getattr(torch, dtype), in_order)


def kv_layout(layout: str, backend: AttentionBackend) -> KVLayout:
    """The order inside a page of the target's cache and the head's; see `attention.cache.kv_cache.CacheGroup`.

    Every backend serves both, with all cache dtypes, page sizes and variants of attention that it serves at all. In
    MLA's cache, which has one head, the two are the same bytes. "auto" is what the backend's kernels read best on its
    GPU (HND on Blackwell), else NHD.
    """
    if layout == "auto":
        return backend.preferred_layout if isinstance(backend, PrefersLayout) else "NHD"
    return "HND" if layout == "HND" else "NHD"


@dataclass(frozen=True)
class StoredScales:
    """A checkpoint's declaration of its KV cache, made in `source`, and its scales.

    scheme: "fp8", another format in words, or "" where it names none. scales: by "k" or "v" and the layer's number in
    the checkpoint.
    """

    scheme: str
    source: str
    scales: Mapping[tuple[str, int], float]


def chosen_scales(
    checkpoint: Checkpoint | None, probed: TargetProbe, given: Sequence[Pair] | None
) -> tuple[Sequence[Pair] | None, str]:
    """The scales of the target's cache in fp8, by attention layer in order, and their origin; None: 1.0 everywhere.

    Raises:
        ModelLoadError: the checkpoint contradicts itself: it declares fp8 and has no scales, has scales for some layers
            only, or has them for another format.
        InvalidInputError: other scales were given than the checkpoint has.
    """
    stored = None if checkpoint is None else stored_scales(checkpoint)
    if checkpoint is None or stored is None:
        return given, "given" if given else ""
    what = f"kv_cache_dtype='fp8' for {checkpoint.name!r}"
    # The number of each attention layer in the model, in the order of the cache.
    names = {module: name for name, module in probed.model.named_modules()}
    found = [_LAYER.findall(names.get(call.module, "")) for call in probed.calls]
    layers = [int(numbers[-1]) if numbers else place for place, numbers in enumerate(found)]
    _check_whole(stored, layers, what, given)
    if not stored.scales:
        return given, "given"
    pairs = [(stored.scales["k", layer], stored.scales["v", layer]) for layer in layers]
    if given is not None:
        if len(given) != len(pairs):
            raise InvalidInputError(
                f"{what}: kv_cache_scales of {len(given)} layers were given; the model has {len(pairs)}"
            )
        for layer, ours, theirs in zip(layers, given, pairs, strict=True):
            if not all(isclose(a, b, rel_tol=_SAME) for a, b in zip(ours, theirs, strict=True)):
                raise InvalidInputError(
                    f"{what}: kv_cache_scales says {ours[0]:g}:{ours[1]:g} for layer {layer}, and the checkpoint has "
                    f"{theirs[0]:g}:{theirs[1]:g} ({stored.source}); leave kv_cache_scales out"
                )
    return pairs, f"calibrated, from the checkpoint ({stored.source})"


def _check_whole(stored: StoredScales, layers: Sequence[int], what: str, given: Sequence[Pair] | None) -> None:
    other = stored.scheme not in ("", "fp8")
    if not stored.scales:
        if given is not None:
            return
        reason = "for which there are no static scales; give kv_cache_scales, or kv_cache_dtype='auto'"
        if not other:
            reason = (
                "but the checkpoint has no k_scale and v_scale; give kv_cache_scales (1.0:1.0 for each layer cuts off "
                "values beyond 448), or a checkpoint with its scales"
            )
        raise ModelLoadError(f"{what}: {stored.source} says that its KV cache is {stored.scheme}, {reason}")
    if other:
        raise ModelLoadError(
            f"{what}: {stored.source} says that the scales of its KV cache are for {stored.scheme}, not for fp8 "
            "(e4m3); give kv_cache_dtype='auto'"
        )
    if lacking := [n for n in layers if not {("k", n), ("v", n)} <= stored.scales.keys()]:
        raise ModelLoadError(
            f"{what}: the checkpoint has scales of its KV cache for some layers only: layers {short(lacking)} of "
            f"{len(layers)} lack k_scale or v_scale; download it again, or give kv_cache_dtype='auto'"
        )


def stored_scales(checkpoint: Checkpoint) -> StoredScales | None:
    """A checkpoint's declaration of its KV cache and its scales; None where it has none, or is not found.

    Raises:
        ModelLoadError: a scale is no positive number, or a layer has a scale for each head.
    """
    try:
        folder = open_folder(_files_of(checkpoint))
    except (HeadLoadError, OSError):  # a loaded model may be called anything; one that was read from here was complete
        return None
    scheme, source = _scheme(folder)
    names = {name: found for name in folder.tensors if (found := _NAME.search(name)) and not _NOT_TEXT.search(name)}
    if not names and not scheme:
        return None
    scales = {}
    for name, tensor in folder.load(names).items():
        found = names[name]
        scale = _number(name, tensor, checkpoint)
        for letter in found["both"] or found["own"] or found["proj"]:
            scales[letter, int(found["layer"])] = scale
    return StoredScales(scheme, source or "its tensors", scales)


def scales_in_words(checkpoint: Checkpoint | None, used: str) -> str | None:
    """For `describe`: the origin of the scales in use, or those that a checkpoint's folder has; None for neither."""
    if used or checkpoint is None or not checkpoint.is_folder:
        return used or None
    stored = stored_scales(checkpoint)
    if stored is None:
        return None
    numbers = stored.scales.values()
    if not numbers:
        return f"none in the checkpoint, though {stored.source} says {stored.scheme}"
    layers = len({layer for _, layer in stored.scales})
    return (
        f"not used; the checkpoint has calibrated ones for {layers} layers, {min(numbers):.3g} to {max(numbers):.3g} "
        f"({stored.source}): kv_cache_dtype='fp8' uses them"
    )


def _files_of(checkpoint: Checkpoint) -> Path:
    """The folder of a checkpoint, in the local cache for a hub model. Raises OSError: it is not there."""
    if checkpoint.is_folder:
        return Path(checkpoint.path)
    where = {"revision": checkpoint.revision, "_raise_exceptions_for_missing_entries": False}
    config = cached_file(checkpoint.path, "config.json", local_files_only=True, **where)
    if config is None:
        raise OSError(f"{checkpoint.path} is not in the local cache")
    # Only fetched into the same folder of the cache, where `_scheme` reads it.
    cached_file(checkpoint.path, MODELOPT_FILE, local_files_only=checkpoint.local_files_only, **where)
    return Path(config).parent


def _number(name: str, tensor: Tensor, checkpoint: Checkpoint) -> float:
    if tensor.numel() == 1 and 0 < (value := float(tensor)) < inf:
        return value
    shown = f"{float(tensor):g}" if tensor.numel() == 1 else f"shape {list(tensor.shape)}"
    raise ModelLoadError(
        f"{checkpoint.name!r}: {name} is {shown}; a scale of the KV cache must be one positive number a layer"
    )


def _scheme(folder: CheckpointFolder) -> tuple[str, str]:
    """The format of the KV cache as the checkpoint names it, and where; "" for none."""
    try:
        beside = read_json(folder.path / MODELOPT_FILE).get("quantization")
    except HeadLoadError:  # it has no such file
        beside = None
    own = lookup(folder.config, "quantization_config") or lookup(folder.config, "text_config.quantization_config")
    for said, file in ((own, "quantization_config"), (beside, MODELOPT_FILE)):
        if not isinstance(said, dict):
            continue
        if algorithm := said.get("kv_cache_quant_algo"):
            return str(algorithm).lower(), f"{file}, kv_cache_quant_algo"
        if isinstance(scheme := said.get("kv_cache_scheme"), dict):
            words = numbers_in_words(scheme)
            return "fp8" if words == "float8 by tensor" else words, f"{file}, kv_cache_scheme"
    return "", ""
