"""Checkpoint folders, local or on the hub: find one, list its tensors without loading them, load some of them."""

from __future__ import annotations

import json
import os
import pickle
import stat
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, TypeVar

import torch
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import get_session, validate_repo_id
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attention.errors import InvalidInputError
from drafters.errors import HeadLoadError, HeadMismatchError

H = TypeVar("H", bound=torch.nn.Module)
Json = dict[str, Any]
"""A JSON object."""
StateDict = dict[str, Tensor]
"""Tensors by their names."""
Names = Mapping[str, str]
"""Names of tensors in the files, by other names."""
CheckpointPath = str | Path
"""A folder, or a model's name on the Hugging Face hub."""

HUB_SECONDS = 3.0
"""How long the hub may take to answer the first request."""

NO_ANSWER = "it does not answer (no network, or HF_HUB_OFFLINE is set), and the local cache has no such model"

HTTP_ERRORS: tuple[type[BaseException], ...] = (OSError, HfHubHTTPError.__mro__[1])
"""What a request to the hub raises: huggingface_hub's HTTP library differs by release, its root error is the base of
`HfHubHTTPError`; the older library's errors are OSErrors."""


def looks_local(name: str) -> bool:
    """Whether only a folder can be meant: more than one separator, or a beginning that no hub name has."""
    return len(Path(name).parts) > 2 or os.path.isabs(name) or name.startswith((".", "/", "~", "\\")) or "\\" in name


def is_hub_name(name: str) -> bool:
    """Whether the hub could have a model of this name ("owner/name", or an old "name")."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return bool(name)


def hub_answers() -> bool:
    """Whether the hub can be reached, by one request of at most three seconds.

    If this returns False, use local files only, which avoids the hub client's retries of more than 20 s. The request
    uses huggingface_hub's session, with the user's proxies, endpoint, certificates and offline mode.
    """
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except HTTP_ERRORS:
        return False
    return True


_ALLOW = ["*.json", "*.safetensors", "pytorch_model*.bin"]
_PICKLED = "pytorch_model.bin"
_BIN = ".bin"
_MOST_SHOWN = 80
_FEW = 4
"""Files that a message names."""
_LFS_POINTER = b"version https://git-lfs"
_LONGEST_HEADER = 100_000_000
"""Bytes; safetensors reads no longer one."""


_READ = (".json", ".safetensors", ".bin")
"""Endings of the files of a checkpoint that are opened by name."""
_FOLDER = "a folder"
_KINDS = {stat.S_ISFIFO: "a named pipe", stat.S_ISDIR: _FOLDER, stat.S_ISSOCK: "a socket"}


@contextmanager
def naming(place: CheckpointPath) -> Iterator[None]:
    """Put the name of a checkpoint before what is wrong with it.

    Raises:
        HeadMismatchError, HeadLoadError: the block raised it, or another InvalidInputError in place of the latter.
    """
    try:
        yield
    except HeadMismatchError as error:
        raise HeadMismatchError(f"{place}: {error}") from error
    except (HeadLoadError, InvalidInputError) as error:
        raise HeadLoadError(f"{place}: {error}") from error


def locate(path: CheckpointPath, revision: str | None = None) -> Path:
    """Folder of a checkpoint: `path` itself when it is a folder, else a model of that name from the Hugging Face hub.

    revision: branch, tag or commit on the hub; a folder has none.

    Raises:
        HeadLoadError: neither a folder nor a name on the hub (or in its local cache); or an entry of the folder with a
            file's name is no file.
    """
    name = os.path.expanduser(path)
    if not name:
        raise HeadLoadError("the name of a folder or of a hub model is empty")
    if os.path.isdir(name):
        if odd := no_files_in(name):
            raise HeadLoadError(f"{path}: {odd}")
        return Path(name)
    if os.path.exists(name):
        raise HeadLoadError(f"{path} is a file; give the folder that holds config.json and the weights")
    if looks_local(name):
        raise HeadLoadError(f"there is no folder {path}; give a folder with config.json and the weights, or a hub name")
    if not is_hub_name(name):
        raise HeadLoadError(
            f"there is no folder {_cut(name)}, and the Hugging Face hub has no such names; give a folder, or a name "
            "like owner/model"
        )
    return _download(name, revision)


def no_files_in(folder: CheckpointPath) -> str:
    """An entry of a checkpoint's folder that has a file's name but is neither file nor folder, in words, or "".

    To open a named pipe would wait for ever, deaf to signals.
    """
    for name in sorted(os.listdir(folder)):
        kind = what_else(os.path.join(folder, name)) if name.endswith(_READ) else ""
        if kind and kind != _FOLDER:
            return f"{name} in it is {kind}, not a file"
    return ""


def what_else(path: CheckpointPath) -> str:
    """What a path leads to, in words, where that is no file; "" for a file and for nothing."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # nothing, or no name that the system takes
        return ""
    if stat.S_ISREG(mode):
        return ""
    return next((kind for is_kind, kind in _KINDS.items() if is_kind(mode)), "a device")


def leads_outside(name: str) -> bool:
    """Whether a name of a file that an index gives leads out of the index's own folder.

    >>> [leads_outside(name) for name in ("model-1.safetensors", "sub/a.bin", "../a.bin", "/a.bin", "C:\\a.bin")]
    [False, False, True, True, True]
    """
    paths = PurePosixPath(name), PureWindowsPath(name)
    return any(path.is_absolute() or path.drive or ".." in path.parts for path in paths)


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    answers = hub_answers()
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_ALLOW, local_files_only=not answers))
    except HTTP_ERRORS as error:
        reason = str(error) if answers else NO_ANSWER
        raise HeadLoadError(
            f"there is no folder {name}, and the Hugging Face hub gave no model of that name: {reason}"
        ) from error


def _cut(name: str) -> str:
    return repr(name) if len(name) <= _MOST_SHOWN else f"{name[:_MOST_SHOWN]!r}…"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: where it is stored, and its dtype and shape."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder with config.json and weights in safetensors or pytorch_model.bin, one file or several with an index.

    config: config.json as read. tensors: every tensor by its name in the files.
    """

    path: Path
    config: Json
    tensors: dict[str, TensorInfo]

    def shapes(self, names: Names) -> dict[str, tuple[int, ...]]:
        """Shapes of tensors by other names; names: these -> names in the files."""
        return {name: self.tensors[full].shape for name, full in names.items()}

    def load(self, names: Iterable[str]) -> StateDict:
        """Load tensors on CPU in their stored dtype; every file is opened once.

        Raises:
            HeadLoadError: a name is not in the folder, or a file cannot be read.
        """
        by_file: dict[Path, list[str]] = {}  # names of experts are spread over many files: each is opened once
        for name in names:
            if name not in self.tensors:
                raise HeadLoadError(f"{self.path} has no tensor {name}")
            by_file.setdefault(self.tensors[name].file, []).append(name)
        loaded: StateDict = {}
        for file, wanted in by_file.items():
            loaded |= _load_file(file, wanted)
        return loaded


def open_folder(path: CheckpointPath) -> CheckpointFolder:
    """Read config.json and the list of tensors of a checkpoint (see `locate` for what `path` may be).

    Preferred is model.safetensors.index.json, then model.safetensors, then pytorch_model.bin.index.json, then
    pytorch_model.bin (tensors only, no code).

    Raises:
        HeadLoadError: folder, config.json or weights are missing or unreadable.
    """
    folder = locate(path)
    config = read_json(folder / "config.json")
    tensors: dict[str, TensorInfo] = {}
    for file in _weight_files(folder):
        for name, info in _list_file(file).items():
            if name in tensors:
                raise HeadLoadError(f"tensor {name} is in {tensors[name].file.name} and again in {file.name}")
            tensors[name] = info
    return CheckpointFolder(folder, config, tensors)


def read_json(file: Path) -> Json:
    """Read a JSON object. Raises HeadLoadError: the file is missing, is no JSON or no object."""
    if kind := what_else(file):
        raise HeadLoadError(f"{file} is {kind}, not a file")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise HeadLoadError(f"{file.parent} has no {file.name}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise HeadLoadError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise HeadLoadError(f"{file} must hold a JSON object, not a {type(content).__name__}")
    return content


def _weight_files(folder: Path) -> list[Path]:
    for name in ("model.safetensors", _PICKLED):
        index = folder / f"{name}.index.json"
        if index.exists():
            named = read_json(index)
            with naming(folder):
                return indexed_files(folder, named, index.name)
        if (folder / name).exists():
            return [folder / name]
    raise HeadLoadError(f"{folder} has no weights: looked for model.safetensors and {_PICKLED}, and an index of either")


def indexed_files(folder: Path, index: Json, name: str) -> list[Path]:
    """The files of weights that an index of this name names.

    Raises:
        HeadLoadError: the index is damaged, or a file is missing, no file, or outside of the folder.
    """
    places = index.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(place, str) for place in places.values()):
        raise HeadLoadError(f"{name} has no weight_map from tensors to files; download it again")
    files = sorted(set(places.values()))
    if outside := [file for file in files if leads_outside(file)]:
        raise HeadLoadError(
            f"{name} names files outside of its folder ({outside[:_FEW]}), which are not read; put them into it"
        )
    if odd := [f"{file} is {kind}" for file in files if (kind := what_else(folder / file))]:
        raise HeadLoadError(f"{odd[0]}, not a file")
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise HeadLoadError(
            f"{len(missing)} of {len(files)} files that {name} names are missing ({', '.join(missing[:_FEW])}); "
            f"download {'it' if len(missing) == 1 else 'them'}"
        )
    return [folder / file for file in files]


def _list_file(file: Path) -> dict[str, TensorInfo]:
    if file.suffix == _BIN:
        # Only shapes are needed, so the data is mapped, not read; torch maps only its zip format, not the older pickle.
        listed = _unpickle(file, mmap=zipfile.is_zipfile(file))
        return {name: TensorInfo(file, tuple(t.shape), str(t.dtype)) for name, t in listed.items()}
    try:
        with safe_open(file, framework="pt") as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118 (not a dict)
            return {name: TensorInfo(file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    except (OSError, SafetensorError) as error:
        raise HeadLoadError(f"{file} is no readable safetensors file: {error}{_likely_cause(file)}") from error


def is_lfs_pointer(file: Path) -> bool:
    """Whether git has put a pointer where the file should be. Raises OSError: it cannot be read."""
    with file.open("rb") as opened:
        return opened.read(len(_LFS_POINTER)) == _LFS_POINTER


def _likely_cause(file: Path) -> str:
    """Why a file of weights is probably unreadable: nothing was downloaded into it, or a part."""
    try:
        with file.open("rb") as opened:
            start, size, pointer = opened.read(8), file.stat().st_size, is_lfs_pointer(file)
    except OSError:
        return ""
    if pointer:
        return ". It is a pointer of git-lfs and not the weights: run `git lfs pull` in its folder, or download it anew"
    if file.suffix != ".safetensors" or size < 8:
        return f". It has {size} bytes: download it anew" if size < 8 else ""
    header = int.from_bytes(start, "little")
    return f". It has {size:,} bytes and is cut off or damaged: download it anew" if header < _LONGEST_HEADER else ""


def _load_file(file: Path, names: list[str]) -> StateDict:
    if file.suffix == _BIN:
        weights = _unpickle(file)
        return {name: weights[name] for name in names}
    try:
        with safe_open(file, framework="pt", device="cpu") as weights:
            return {name: weights.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise HeadLoadError(f"{file} is no readable safetensors file: {error}") from error


def _unpickle(file: Path, mmap: bool = False) -> StateDict:
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise HeadLoadError(
            f"{file} cannot be read as a plain dictionary of tensors: it is damaged, or pickles more than tensors, "
            f"which could run code and is never read; use weights in safetensors{_likely_cause(file)}"
        ) from error
    # The restricted unpickler raises any of these on damaged bytes, depending on the operation that it misreads.
    except (OSError, RuntimeError, EOFError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise HeadLoadError(f"{file} cannot be read as a plain dictionary of tensors: {error}") from error
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(t, Tensor) for name, t in weights.items()
    ):
        raise HeadLoadError(f"{file} must hold a plain dictionary of tensors")
    return weights


def filled(head: H, weights: StateDict) -> H:
    """A head whose parameters are these tensors from now on, ready for inference.

    Raises:
        HeadLoadError: tensors with NaN or infinity, all named (exporters leave unloaded weights as NaN).
    """
    broken = [name for name, tensor in weights.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise HeadLoadError(f"tensors with NaN or infinity after the cast to the requested dtype: {', '.join(broken)}")
    head.load_state_dict(weights, assign=True)
    return head.eval().requires_grad_(False)


def write_folder(folder: Path, config: Json, tensors: StateDict) -> Path:
    """Write config.json and the tensors of a checkpoint; returns the folder. tensors: see `write_tensors`."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tensors(folder, tensors)
    return folder


def write_tensors(folder: Path, tensors: StateDict) -> None:
    """Write model.safetensors, whole or not at all; last of a folder's files, as a folder with weights is complete.

    tensors: contiguous, and no two that share memory.
    """
    partial = folder / "model.safetensors.partial"
    save_file(dict(tensors), partial, metadata={"format": "pt"})  # as save_pretrained writes it
    os.replace(partial, folder / "model.safetensors")
