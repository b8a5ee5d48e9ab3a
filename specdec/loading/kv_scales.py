"""Calibrated scales of an 8-bit KV cache that a checkpoint brings: read for `kv_cache_dtype="fp8"`, and shown.

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
from math import isclose
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from drafters.checkpoints.tensor_files import CheckpointFolder, open_folder
from drafters.errors import HeadLoadError
from specdec.errors import InvalidInputError, ModelLoadError
from specdec.loading.checkpoint import Checkpoint, object_in
from specdec.loading.quantisation import MODELOPT_FILE
from specdec.values import short
from specdec.wrapped.probing import TargetProbe

Pair = tuple[float, float]
"""Scale of keys, scale of values."""
_NAME = re.compile(
    r"(?:^|\.)layers\.(?P<layer>\d+)\.\w+\.(?:"
    r"(?P<own>[kv])_scale|(?P<proj>[kv])_proj\.(?:(?P=proj)_scale|output_scale)|(?P<both>kv)_scale)$"
)
_NOT_TEXT = re.compile(r"vision|visual|audio|image|mtp")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_SAME = 1e-5


@dataclass(frozen=True)
class StoredScales:
    """A checkpoint's declaration of its KV cache, made in `source`, and its scales by layer number in the checkpoint.

    scheme: "fp8", another format in words, or "" where it names none.
    """

    scheme: str
    source: str
    keys: Mapping[int, float]
    values: Mapping[int, float]


def chosen_scales(
    checkpoint: Checkpoint | None, probed: TargetProbe, dtype: str, given: Sequence[Pair] | None
) -> tuple[Sequence[Pair] | None, str]:
    """The scales of the target's cache, by attention layer in order, and their origin; None: 1.0 everywhere.

    The checkpoint's scales are read for dtype "fp8" only.

    Raises:
        ModelLoadError: the checkpoint contradicts itself: it declares fp8 and has no scales, has scales for some layers
            only, or has them for another format.
        InvalidInputError: other scales were given than the checkpoint has.
    """
    stored = stored_scales(checkpoint) if dtype == "fp8" and checkpoint is not None else None
    if checkpoint is None or stored is None:
        return given, "given" if given else ""
    what, layers = f"kv_cache_dtype='fp8' for {checkpoint.name!r}", _layer_numbers(probed)
    _check_whole(stored, layers, what, given)
    if not stored.keys:
        return given, "given"
    pairs = [(stored.keys[layer], stored.values[layer]) for layer in layers]
    if given is not None:
        _check_same(given, pairs, layers, what, stored)
    return pairs, f"calibrated, from the checkpoint ({stored.source})"


def _check_whole(stored: StoredScales, layers: Sequence[int], what: str, given: Sequence[Pair] | None) -> None:
    has = bool(stored.keys or stored.values)
    if has and stored.scheme not in ("", "fp8"):
        raise ModelLoadError(
            f"{what}: {stored.source} says that the scales of its KV cache are for {stored.scheme}, not for fp8 "
            "(e4m3); give kv_cache_dtype='auto'"
        )
    if not has and stored.scheme == "fp8" and given is None:
        raise ModelLoadError(
            f"{what}: {stored.source} says that its KV cache is fp8, but the checkpoint has no k_scale and v_scale; "
            "give kv_cache_scales (1.0:1.0 for each layer cuts off values beyond 448), or a checkpoint with its scales"
        )
    if not has and stored.scheme not in ("", "fp8") and given is None:
        raise ModelLoadError(
            f"{what}: {stored.source} says that its KV cache is {stored.scheme}, for which there are no static scales; "
            "give kv_cache_scales, or kv_cache_dtype='auto'"
        )
    lacking = [n for n in layers if n not in stored.keys or n not in stored.values] if has else []
    if lacking:
        raise ModelLoadError(
            f"{what}: the checkpoint has scales of its KV cache for some layers only: layers {short(lacking)} of "
            f"{len(layers)} lack k_scale or v_scale; download it again, or give kv_cache_dtype='auto'"
        )


def _check_same(
    given: Sequence[Pair], pairs: Sequence[Pair], layers: Sequence[int], what: str, stored: StoredScales
) -> None:
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
    keys: dict[int, float] = {}
    values: dict[int, float] = {}
    for name, tensor in folder.load(names).items():
        found, scale = names[name], _number(name, tensor, checkpoint)
        for letter in found["both"] or found["own"] or found["proj"]:
            (keys if letter == "k" else values)[int(found["layer"])] = scale
    return StoredScales(scheme, source or "its tensors", keys, values)


def scales_in_words(checkpoint: Checkpoint | None, used: str) -> str | None:
    """For `describe`: the origin of the scales in use, or those that a checkpoint's folder has; None for neither."""
    if used or checkpoint is None or not checkpoint.is_folder:
        return used or None
    stored = stored_scales(checkpoint)
    if stored is None:
        return None
    numbers = [*stored.keys.values(), *stored.values.values()]
    if not numbers:
        return f"none in the checkpoint, though {stored.source} says {stored.scheme}"
    layers = len({*stored.keys, *stored.values})
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


def _number(name: str, tensor: torch.Tensor, checkpoint: Checkpoint) -> float:
    value = float(tensor) if tensor.numel() == 1 else float("nan")
    if not 0 < value < float("inf"):
        shown = f"shape {list(tensor.shape)}" if tensor.numel() != 1 else f"{value:g}"
        raise ModelLoadError(
            f"{checkpoint.name!r}: {name} is {shown}; a scale of the KV cache must be one positive number a layer"
        )
    return value


def _scheme(folder: CheckpointFolder) -> tuple[str, str]:
    """The format of the KV cache as the checkpoint names it, and where; "" for none."""
    text = folder.config.get("text_config")
    config = folder.config.get("quantization_config") or (
        text.get("quantization_config") if isinstance(text, dict) else None
    )
    own = config if isinstance(config, dict) else {}
    beside = object_in(folder.path / MODELOPT_FILE).get("quantization")
    for said, file in ((own, "quantization_config"), (beside if isinstance(beside, dict) else {}, MODELOPT_FILE)):
        if algorithm := said.get("kv_cache_quant_algo"):
            return str(algorithm).lower(), f"{file}, kv_cache_quant_algo"
        if isinstance(scheme := said.get("kv_cache_scheme"), dict):
            return _in_words(scheme), f"{file}, kv_cache_scheme"
    return "", ""


def _in_words(scheme: Mapping[str, Any]) -> str:
    """'fp8' for the format of this cache; else the numbers' type, strategy and whether scales are dynamic.

    >>> _in_words({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False})
    'fp8'
    >>> _in_words({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True})
    'int8 by token, dynamic'
    """
    by, dynamic = scheme.get("strategy") or "tensor", bool(scheme.get("dynamic"))
    if scheme.get("num_bits") == 8 and scheme.get("type") == "float" and by == "tensor" and not dynamic:
        return "fp8"
    return f"{scheme.get('type')}{scheme.get('num_bits')} by {by}{', dynamic' if dynamic else ''}"


def _layer_numbers(probed: TargetProbe) -> list[int]:
    """The number of each attention layer in the model, in the order of the cache."""
    names = {module: name for name, module in probed.model.named_modules()}
    found = [_LAYER.findall(names.get(call.module, "")) for call in probed.calls]
    return [int(numbers[-1]) if numbers else place for place, numbers in enumerate(found)]
