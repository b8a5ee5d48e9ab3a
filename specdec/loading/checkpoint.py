"""Checkpoint: the folder or hub model that a target is read from, found and looked at before anything is loaded.

Checks of its files raise errors without its name, to which `specdec.loading.load_errors.loading_named` adds it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from inspect import unwrap
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING
from transformers import __version__ as transformers_version
from transformers.utils import cached_file

from drafters.checkpoints.config_fields import Config
from drafters.checkpoints.layouts import Layout, detect_by_config, layout_of_folder
from drafters.checkpoints.tensor_files import (
    hub_answers,
    indexed_files,
    is_hub_name,
    is_lfs_pointer,
    looks_local,
    no_files_in,
    open_folder,
    read_json,
)
from specdec.errors import HeadLoadError, InvalidInputError, ModelLoadError
from specdec.import_names import uncollected
from specdec.loading.names import ModelName, find_gguf, give_model, is_gguf, misspelt, resolve
from specdec.loading.quantisation import (
    GGUF,
    MODELOPT,
    MODELOPT_FILE,
    QUANTO_MAP,
    Quantisation,
    check_packages,
    check_quantisation,
)
from specdec.options.kinds import OrAuto
from specdec.values import Options, only, short, without_none

_WHOLE = ("model.safetensors", "pytorch_model.bin")
"""In the order in which transformers looks for them; an index of shards is looked for after each.

Source: transformers/modeling_utils.py, `_get_resolved_checkpoint_files`."""
_SHARD = re.compile(r"model-\d+-of-\d+\.(safetensors|bin)")


def check_weight_files(folder: Path) -> None:
    """Check that all weights of a folder are there.

    Raises:
        ModelLoadError: names the missing or unexpected files.
    """
    names = {entry.name for entry in folder.iterdir()}
    for name in _WHOLE:
        if name in names:
            return
        if f"{name}.index.json" in names:
            index = read_json(folder / f"{name}.index.json")
            try:
                indexed_files(folder, index, f"{name}.index.json")
            except HeadLoadError as error:
                raise ModelLoadError(str(error)) from error
            return
    raise ModelLoadError(f"{_without_weights(names)}")


def _without_weights(names: Collection[str]) -> str:
    """What a folder with a config.json and no weights contains instead, in words."""
    shards = sorted(name for name in names if _SHARD.fullmatch(name))
    if shards:
        return f"it holds shards of weights ({shards[0]}, …) and no index of them ({_WHOLE[0]}.index.json); download it"
    if files := [name for name in names if name.endswith(".gguf")]:
        return f"its weights are GGUF files: give gguf_file=…, one of {short(sorted(files))}"
    own = sorted(name for name in names if name.startswith("consolidated."))
    if own:
        return f"its weights ({own[0]}) are in their maker's own format; take the model as {_WHOLE[0]} or its shards"
    return f"it has no weights ({_WHOLE[0]}, or its index and shards); it holds {short(sorted(names))}"


_TARGETS = {Layout.CAUSAL_LM, Layout.UNKNOWN, *(layout for layout in Layout if layout.name.startswith("MTP_"))}
"""Layouts of a target, with or without a module; all others are of heads."""
_PLAIN = {"F32", "F16", "BF16"}
"""Types in a GGUF file that are no quantisation."""
_INDEX = "model.safetensors.index.json"
_MOST_TENSORS_OF_A_HEAD = 100
"""Folders with an index of more tensors are not examined as heads, which would read the header of every shard."""
_LAYER_COUNTS = frozenset(
    {"num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers"}
)
_MOST_LAYERS = 1024
"""Eight times the layers of the deepest models. transformers makes all modules before it looks at any weight."""


@dataclass(frozen=True)
class Checkpoint:
    """Where a model is read from.

    Attributes:
        name: as the user gave it. path: a folder or a hub name, for transformers' from_pretrained.
        revision: on the hub; None is its main branch. trust_remote_code: whether its Python files may run.
        local_files_only: whether only the hub's local cache is read, as the hub does not answer.
        adapter: the adapter to apply to the model when it is loaded, or None.
        quantisation: how its weights are stored, once it is loaded; None where they are not quantised.
        gguf_file: the GGUF file that holds model and tokenizer, by its whole path in a folder; None for other formats.
    """

    name: str
    path: str
    revision: str | None = None
    trust_remote_code: bool = False
    local_files_only: bool = False
    adapter: Adapter | None = None
    quantisation: Quantisation | None = None
    gguf_file: str | None = None

    @property
    def builtin(self) -> bool:
        """Whether it came with specdec."""
        return self.path != self.name and self.gguf_file is None

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder on this machine, with a model in files other than GGUF."""
        return os.path.isdir(self.path) and self.gguf_file is None

    @property
    def is_quanto(self) -> bool:
        """Whether it is a folder that optimum-quanto wrote."""
        return self.is_folder and os.path.isfile(os.path.join(self.path, QUANTO_MAP))

    @property
    def options(self) -> Options:
        """For every from_pretrained of transformers: config, model and tokenizer must be of one revision."""
        return without_none(only(vars(self), ("trust_remote_code", "local_files_only", "revision", "gguf_file")))


@dataclass(frozen=True)
class Adapter:
    """An adapter to apply to a target when it is loaded. name: as the user gave it; checkpoint: where the adapter lies.

    kind: its peft_type. base: the model that it was trained for, by its configuration; "" where that names none.
    merge: see the load option merge_adapter.
    """

    name: str
    checkpoint: Checkpoint
    kind: str
    base: str
    merge: OrAuto

    def __str__(self) -> str:
        trained = f", trained for {self.base}" if self.base else ""
        return f"{self.name} ({self.kind}{trained})"


def find_checkpoint(
    name: ModelName,
    revision: str | None = None,
    trust_remote_code: bool = False,
    what: str = "the target model",
    gguf_file: str | None = None,
) -> Checkpoint:
    """Find a target or a tokenizer (`what`) by name. A name that can only be a folder is not looked up on the hub.

    Raises:
        ModelLoadError: the folder does not exist, is a file, or the name is no hub model's; or something in the folder
            has a file's name but is not a file; or which GGUF file is meant is not clear.
        InvalidInputError: a revision of a folder.
    """
    (path, file) = find_gguf(resolve(name), gguf_file)
    local = False
    if os.path.isdir(path):
        if revision is not None:
            raise InvalidInputError(
                f"revision={revision!r}: {name} is a folder, and only models on the hub have revisions; leave it out"
            )
        reason = no_files_in(path)
    elif not path:
        reason = "the name is empty"
    elif os.path.exists(path):
        reason = "it is a file"
    elif looks_local(path):
        reason = "there is no folder of that name"
    elif not is_hub_name(path):
        reason = "there is no folder of that name, and the hub has no such names"
    else:
        reason = misspelt(path)
        local = not reason and not hub_answers()
    if reason:
        raise ModelLoadError(f"cannot load {what} {short(str(name))}: {reason}.\n{give_model()}")
    return Checkpoint(str(name), path, revision, trust_remote_code, local, gguf_file=file)


def check_target_folder(checkpoint: Checkpoint) -> None:
    """Check that a folder holds a causal language model for transformers. Hub names and GGUF files pass.

    Raises:
        ModelLoadError: it does not; the message describes its contents.
    """
    if not checkpoint.is_folder:
        return
    folder = Path(checkpoint.path)
    names = {entry.name for entry in folder.iterdir()}
    if "config.json" not in names:
        raise ModelLoadError(f"{_without_config(names)}\n{give_model()}")
    config = read_json(folder / "config.json")
    if "generation_config.json" in names:
        read_json(folder / "generation_config.json")  # transformers ignores a damaged one, and so its eos ids
    check_quantisation(_modelopt_config(folder, names))
    check_quantisation(config.get("quantization_config"))
    files = sorted(f for f in folder.iterdir() if f.suffix in (".safetensors", ".bin") and f.is_file())
    pointers = [file.name for file in files if is_lfs_pointer(file)]
    if pointers:
        raise ModelLoadError(
            f"{len(pointers)} of {len(files)} files of its weights are git-lfs pointers, not the files "
            f"themselves ({short(pointers)}): run `git lfs pull` in the folder, or download it with `hf download`"
        )
    check_depth(config)
    _check_no_head(folder, config, names)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise ModelLoadError("config.json has no model_type; it is no model that transformers can read")
    if kind not in CONFIG_MAPPING and "auto_map" not in config:
        raise ModelLoadError(
            f"config.json says model_type={kind!r}, which transformers {transformers_version} does not know; a "
            "newer release may"
        )


def gguf_types(checkpoint: Checkpoint) -> Mapping[str, str] | None:
    """A `quantization_config` for a GGUF file, with the types of its tensors; None where all are plain numbers.

    Of a hub model the file is fetched.

    Source: transformers/integrations/gguf/reader.py, `read_gguf_metadata`, which leaves out the types.

    Raises:
        ModelLoadError: a package is missing, or the file is one of several. ValueError, struct.error,
            NotImplementedError: it is no GGUF file, or has a type that transformers would meet in the middle of others.
    """
    check_packages(GGUF)
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
    from transformers.integrations.gguf import reader

    file = str(cached_file(checkpoint.path, str(checkpoint.gguf_file), **checkpoint.options))
    blob = reader._mapped(file)
    metadata, number, place = reader._read_metadata(blob, file)
    if metadata.get("split.count", 1) > 1:
        raise ModelLoadError("it is one of several parts: join them by llama.cpp's `llama-gguf-split --merge`")
    tensors, _ = reader._read_tensor_table(blob, number, place)
    types = {GGMLQuantizationType(kind) for *_, kind, _ in tensors}
    for kind in types:
        dequantize(blob[: GGML_QUANT_SIZES[kind][1]], kind)  # any block of that size
    packed = sorted({kind.name for kind in types} - _PLAIN)
    return {"quant_method": GGUF, "quant_type": ", ".join(packed)} if packed else None


@contextmanager
def parsed_once(target: Any, gguf_file: str | None) -> Iterator[None]:
    """Inside, the package gguf parses a target's file once, and makes a table of tensors' names once.

    transformers reads the file for the configuration, for the weights and for the tokenizer, seconds each, and asks for
    the table once for every module.

    Source: transformers/modeling_gguf_pytorch_utils.py, `load_gguf_checkpoint` and `get_gguf_hf_weights_map`.
    """
    if not (is_gguf(target, gguf_file) and find_spec("gguf")):
        yield
        return
    import gguf

    # unwrap: of another thread that loads meanwhile these are here already, and must not stay.
    before = {name: unwrap(getattr(gguf, name)) for name in ("GGUFReader", "get_tensor_name_map")}
    vars(gguf).update({name: lru_cache(maxsize=1)(made) for name, made in before.items()})
    try:
        with uncollected():
            yield
    finally:
        vars(gguf).update(before)


def check_depth(config: Config) -> None:
    """Check that a configuration, and those inside it, has no more layers than any model, before one of them is made.

    Raises:
        ModelLoadError: names the field.
    """
    for name, value in config.items():
        if isinstance(value, Mapping):
            check_depth(value)
        elif name in _LAYER_COUNTS and isinstance(value, int) and value > _MOST_LAYERS:
            raise ModelLoadError(
                f"its configuration says {name}={short(value)}; at most {_MOST_LAYERS} layers are loaded, more "
                "than any model has: the file is damaged, or no model's"
            )


def _without_config(names: set[str]) -> str:
    if not names:
        return "the folder is empty"
    return f"the folder has no config.json; it holds {short(sorted(names))}"


def _check_no_head(folder: Path, config: Config, names: set[str]) -> None:
    try:
        # A folder of few tensors may be a head's.
        places = read_json(folder / _INDEX).get("weight_map") if _INDEX in names else None
        few = len(places) <= _MOST_TENSORS_OF_A_HEAD if isinstance(places, dict) else _WHOLE[0] in names
        layout = layout_of_folder(open_folder(folder)) if few else detect_by_config(config)
    except HeadLoadError:
        return  # tensors that differ by a prefix only, damaged or missing files: transformers reports them
    if layout is not None and layout not in _TARGETS:
        raise ModelLoadError(f"it is a draft head ({layout.value}); give it as draft=…, and its target here")


def _modelopt_config(folder: Path, names: set[str]) -> Config | None:
    """ModelOpt's own file about its quantisation, as a `quantization_config`; None without such a file."""
    if MODELOPT_FILE not in names:
        return None
    said = read_json(folder / MODELOPT_FILE).get("quantization")
    return {"quant_method": MODELOPT, **(said if isinstance(said, dict) else {})}
