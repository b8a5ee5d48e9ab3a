"""Checkpoints whose weights are drawn when they are read: tens of gigabytes of a published width in no time.

A file is a safetensors file with the names, shapes and dtypes of a whole checkpoint. What tells layers apart by value
(norms, biases, token maps) is written; of the matrices there is only a hole, which takes no room on the disk and reads
as zeros, and the file's metadata says how they are drawn. Once `install` was called in a process, whatever opens such a
file gets random matrices, made on its GPU when they are asked for, by a seed that follows from the name: so every rank
cuts its share out of the same matrix. All else is the real thing: transformers and specdec read the folder, convert,
divide and place as ever, and other files are read as they are.

Ranks are processes of their own. `in_every_rank` puts `benchmarks/in_ranks` on the path, whose sitecustomize.py Python
runs when such a process starts.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch

_DRAWN = "drawn"
"""Of a file's metadata: JSON, tensor name -> standard deviation."""
_FILE_BYTES = 4 << 30
"""Of a file: an operating system may refuse to map one larger than its memory."""
_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}
_open: Any = safetensors.safe_open


def write_drawn(
    folder: Path, drawn: Mapping[str, tuple[tuple[int, ...], float]], stored: Mapping[str, torch.Tensor]
) -> None:
    """Write the weights of a checkpoint, into as many files as keep each one small.

    Args:
        drawn: name -> shape and standard deviation of bfloat16 tensors. stored: name -> a tensor as it is.
    """
    parts: list[dict[str, tuple[tuple[int, ...], float]]] = [{}]
    size = 0
    for name, (shape, std) in drawn.items():
        size += 2 * torch.Size(shape).numel()
        if size > _FILE_BYTES and parts[-1]:
            parts.append({})
            size = 2 * torch.Size(shape).numel()
        parts[-1][name] = (shape, std)
    names = [f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(1, len(parts) + 1)]
    if len(parts) == 1:
        names = ["model.safetensors"]
    places: dict[str, str] = {}
    for i, (name, part) in enumerate(zip(names, parts, strict=True)):
        own = stored if i == 0 else {}
        _write(folder / name, part, own)
        places |= dict.fromkeys([*own, *part], name)
    if len(parts) > 1:
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _write(file: Path, drawn: Mapping[str, tuple[tuple[int, ...], float]], stored: Mapping[str, torch.Tensor]) -> None:
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", _DRAWN: json.dumps({name: std for name, (_, std) in drawn.items()})}
    }
    end, pieces = 0, []
    for name, tensor in stored.items():
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        places = [end, end + len(data)]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": places}
        pieces.append(data)
        end += len(data)
    for name, (shape, _) in drawn.items():
        places = [end, end + 2 * torch.Size(shape).numel()]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": places}
        end = places[1]
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)
    with file.open("wb") as out:
        out.write(len(words).to_bytes(8, "little") + words + b"".join(pieces))
        out.truncate(8 + len(words) + end)


def draw(name: str, shape: list[int], std: float) -> torch.Tensor:
    """The tensor of this name, in bfloat16, on the GPU of this process's rank where there is one."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, std, generator=generator)


class DrawnSlice:
    """A tensor that is drawn when it is indexed; as safetensors' slices otherwise."""

    def __init__(self, name: str, found: Any, std: float) -> None:
        """found: safetensors' slice of the hole."""
        self._name, self._found, self._std = name, found, std

    def get_shape(self) -> list[int]:
        """See safetensors."""
        shape: list[int] = self._found.get_shape()
        return shape

    def get_dtype(self) -> str:
        """See safetensors."""
        dtype: str = self._found.get_dtype()
        return dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """A part, in memory of its own."""
        return draw(self._name, self.get_shape(), self._std)[index].clone()


class DrawnFile:
    """An open file; what is drawn of it is drawn, the rest is read."""

    def __init__(self, file: Any, drawn: Mapping[str, float]) -> None:
        """file: as safetensors opened it. drawn: name -> standard deviation."""
        self._file, self._drawn = file, drawn

    def get_slice(self, name: str) -> Any:
        """See safetensors."""
        found = self._file.get_slice(name)
        return DrawnSlice(name, found, self._drawn[name]) if name in self._drawn else found

    def get_tensor(self, name: str) -> torch.Tensor:
        """See safetensors."""
        found: torch.Tensor = self.get_slice(name)[...] if name in self._drawn else self._file.get_tensor(name)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> DrawnFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)


def open_drawn(*args: Any, **kwargs: Any) -> Any:
    """As `safetensors.safe_open`."""
    file = _open(*args, **kwargs)
    drawn = (file.metadata() or {}).get(_DRAWN)
    return file if drawn is None else DrawnFile(file, json.loads(drawn))


def install() -> None:
    """From now on such files are drawn in this process, whichever module opens them. Idempotent."""
    safetensors.safe_open = open_drawn  # type: ignore[misc, assignment]
    for module in list(sys.modules.values()):
        if vars(module).get("safe_open") is _open and module.__name__ != "safetensors._safetensors_rust":
            module.safe_open = open_drawn  # type: ignore[attr-defined]


def in_every_rank() -> None:
    """`install` here, and in the processes of ranks that are started from now on."""
    install()
    folder = str(Path(__file__).with_name("in_ranks"))
    if folder not in sys.path:
        sys.path.insert(0, folder)
