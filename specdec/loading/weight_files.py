"""The files of a target's weights, looked at before transformers opens one: which are missing, and what they are."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from drafters.checkpoints.tensor_files import is_lfs_pointer, leads_outside, what_else
from specdec.errors import ModelLoadError
from specdec.values import short

_WHOLE = ("model.safetensors", "pytorch_model.bin")
"""In the order in which transformers looks for them; an index of shards is looked for after each.

Source: transformers/modeling_utils.py, `_get_resolved_checkpoint_files`."""
_SHARD = re.compile(r"model-\d+-of-\d+\.(safetensors|bin)")


def check_weight_files(folder: Path, what: str) -> None:
    """Refuse a folder whose weights are not there, or not all of them.

    Args:
        what: for the message, what cannot be loaded.

    Raises:
        ModelLoadError: the message names what is missing, or what there is instead.
    """
    names = {entry.name for entry in folder.iterdir()}
    for name in _WHOLE:
        if name in names:
            return
        if f"{name}.index.json" in names:
            _check_shards(folder, _shards(folder / f"{name}.index.json", what), what)
            return
    raise ModelLoadError(f"{what}: {_without_weights(names)}")


def check_no_pointers(folder: Path, what: str) -> None:
    """Refuse a folder in which git has put pointers to its weights.

    Raises:
        ModelLoadError: the message says how to get the files.
    """
    files = sorted(f for f in folder.iterdir() if f.suffix in (".safetensors", ".bin") and f.is_file())
    pointers = [file.name for file in files if is_lfs_pointer(file)]
    if pointers:
        raise ModelLoadError(
            f"{what}: {len(pointers)} of {len(files)} files of its weights are git-lfs pointers, not the files "
            f"themselves ({short(pointers)}): run `git lfs pull` in the folder, or download it with `hf download`"
        )


def _shards(index: Path, what: str) -> Collection[str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{what}: {index.name} cannot be read as JSON: {error}; download it again") from error
    places = found.get("weight_map") if isinstance(found, Mapping) else None
    if not isinstance(places, Mapping) or not places or not all(isinstance(place, str) for place in places.values()):
        raise ModelLoadError(f"{what}: {index.name} has no weight_map from tensors to files; download it again")
    outside = sorted({place for place in places.values() if leads_outside(place)})
    if outside:
        raise ModelLoadError(
            f"{what}: {index.name} names files outside of its folder ({short(outside)}), which are not read; put them "
            "into it"
        )
    return sorted(set(places.values()))


def _check_shards(folder: Path, files: Collection[str], what: str) -> None:
    odd = [f"{name} is {kind}" for name in files if (kind := what_else(folder / name))]
    if odd:
        raise ModelLoadError(f"{what}: {odd[0]}, not a file")
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(
            f"{what}: {len(missing)} of {len(files)} files of its weights are missing ({short(missing)}); download "
            f"{'it' if len(missing) == 1 else 'them'}"
        )


def _without_weights(names: Collection[str]) -> str:
    """What a folder with a config.json and no weights holds instead."""
    shards = sorted(name for name in names if _SHARD.fullmatch(name))
    if shards:
        return f"it holds shards of weights ({shards[0]}, …) and no index of them ({_WHOLE[0]}.index.json); download it"
    if any(name.endswith(".gguf") for name in names):
        return "its weights are GGUF files, which are not supported; take the model in safetensors"
    own = sorted(name for name in names if name.startswith("consolidated."))
    if own:
        return f"its weights ({own[0]}) are in their maker's own format; take the model as {_WHOLE[0]} or its shards"
    return f"it has no weights ({_WHOLE[0]}, or its index and shards); it holds {short(sorted(names))}"
