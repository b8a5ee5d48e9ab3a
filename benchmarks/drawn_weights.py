"""Checkpoints whose weights are drawn when they are read: tens of gigabytes of a published width in no time.

A file is a safetensors file of what tells layers apart by value (norms, biases, token maps), whose metadata holds the
names and shapes of the matrices, and how they are drawn. Once `install` was called in a process, whatever opens such a
file finds the matrices in it, made on its GPU when they are asked for, by a seed that follows from the name: so every
rank cuts its share out of the same matrix. All else is the real thing: transformers and specdec read the folder,
convert, divide and place as ever, and other files are read as they are.

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
from safetensors.torch import save_file

_DRAWN = "drawn"
"""Of a file's metadata: JSON, tensor name -> shape and standard deviation."""
_open: Any = safetensors.safe_open


def write_drawn(
    folder: Path, drawn: Mapping[str, tuple[tuple[int, ...], float]], stored: dict[str, torch.Tensor]
) -> None:
    """Write the weights of a checkpoint.

    Args:
        drawn: name -> shape and standard deviation of bfloat16 tensors. stored: name -> a tensor as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt", _DRAWN: json.dumps(drawn)})


def draw(name: str, shape: list[int], std: float) -> torch.Tensor:
    """The tensor of this name, in bfloat16, on the GPU of this process's rank where there is one."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, std, generator=generator)


class DrawnSlice:
    """A tensor that is drawn when it is indexed; as safetensors' slices otherwise."""

    def __init__(self, name: str, shape: list[int], std: float) -> None:
        self._name, self._shape, self._std = name, shape, std

    def get_shape(self) -> list[int]:
        """See safetensors."""
        return self._shape

    def get_dtype(self) -> str:
        """See safetensors."""
        return "BF16"

    def __getitem__(self, index: Any) -> torch.Tensor:
        """A part, in memory of its own."""
        return draw(self._name, self._shape, self._std)[index].clone()


class DrawnFile:
    """An open file; what is drawn of it is drawn, the rest is read."""

    def __init__(self, file: Any, drawn: Mapping[str, tuple[list[int], float]]) -> None:
        """file: as safetensors opened it. drawn: name -> shape and standard deviation."""
        self._file, self._drawn = file, drawn

    def keys(self) -> list[str]:
        """See safetensors."""
        return [*self._file.keys(), *self._drawn]

    def get_slice(self, name: str) -> Any:
        """See safetensors."""
        return DrawnSlice(name, *self._drawn[name]) if name in self._drawn else self._file.get_slice(name)

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
