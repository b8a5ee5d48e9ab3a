"""What the names of a target and of a head mean: a built-in model, a folder, one on the hub, or a head given alone.

A built-in model is a folder of `specdec/models/`, with a config.json, weights and a card. A head given alone in place
of a target brings the target that its own config.json names. Nothing here imports torch before it is needed: commands
list and complete names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from specdec.errors import HeadLoadError, HeadMismatchError, InvalidInputError, ModelLoadError
from specdec.values import Fields, short

ModelName = str | Path
"""A built-in model's name, a folder, or a name on the Hugging Face hub."""
GSM_LLAMA = "gsm-llama"
AUTO_HEAD = "auto"
"""The head that belongs to what was given as the target: a built-in one's, or the head itself that was given alone."""
BUILTIN_HEADS = {
    AUTO_HEAD: {GSM_LLAMA: "gsm-llama-eagle3", "gsm-deepseek": "gsm-deepseek"},
    "block": {GSM_LLAMA: "gsm-llama-block"},
}
"""By a word that `draft` takes: built-in targets, and the head that it means for each."""
PUBLISHED_HEADS = {"SmolLM2-135M-Instruct": "smollm2-135m-eagle3"}
"""The same of published targets, known by how the last part of their name begins: on the hub, of a folder or a file."""

DRAFT_WORDS = {
    AUTO_HEAD: "the built-in head",
    "block": "the built-in head that drafts a whole block in one pass",
    "mtp": "the module in the target's checkpoint",
    "lookup": "drafts without a head",
}
"""Words that `draft` takes, and what each means."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")

_ROOT = Path(str(files("specdec"))) / "models"
Loaded = TypeVar("Loaded")


def builtin_names() -> tuple[str, ...]:
    """Names of the built-in models that this installation holds, sorted."""
    return tuple(sorted(config.parent.name for config in _ROOT.glob("*/config.json")))


def builtin_path(name: str) -> Path:
    """The folder of a built-in model, for `from_pretrained`.

    Raises:
        InvalidInputError: no built-in model has this name.
    """
    if name not in builtin_names():
        raise InvalidInputError(
            f"There is no built-in model {name!r}. Built in are: {', '.join(builtin_names()) or 'none'}. "
            "Give one of these names or the path of a model folder."
        )
    return _ROOT / name


def misspelt(name: ModelName) -> str:
    """What is wrong with a name that is nearly a built-in model's, in words; "" where it is none, or means a folder."""
    text = str(name)
    close = get_close_matches(text, builtin_names(), 1, 0.8)
    if not close or text in builtin_names() or os.path.exists(os.path.expanduser(text)):
        return ""
    return (
        f"there is no folder of that name; did you mean {close[0]!r}? Built in are {', '.join(builtin_names())}; "
        "models of the hub are given as owner/name"
    )


def misspelt_draft(draft: ModelName) -> str:
    """As `misspelt`, of a value of `draft`: a word that it takes, or a built-in head."""
    text = str(draft)
    if text == "none":
        return "without a head draft is None, which is the default"
    close = [] if "/" in text or os.path.exists(text) else get_close_matches(text.lower(), DRAFT_WORDS, 1, 0.6)
    return f"did you mean {close[0]!r}, {DRAFT_WORDS[close[0]]}?" if close else misspelt(text)


def find_gguf(path: str, given: str | None) -> tuple[str, str | None]:
    """The folder or hub name of a model, and the GGUF file in it: a whole path in a folder; None for other formats.

    given: the file's name. Without one, `path` may be the file, or a folder with one such file and no config.json.

    Raises:
        ModelLoadError: there is no such file, or there are several.
    """
    folder = Path(path).absolute()
    if not os.path.isdir(folder):  # False of a text that no file can be named by, where `Path.is_dir` raises
        if given is not None or folder.suffix != ".gguf":
            return path, given
        folder, given = folder.parent, folder.name
    found = sorted(file.name for file in folder.glob("*.gguf") if given in (None, file.name))
    if given is None and (not found or (folder / "config.json").exists()):
        return path, None
    if len(found) != 1:
        raise ModelLoadError(
            f"gguf_file={given!r} means {found or 'no file'} in {folder}; give the name or the whole path of one"
        )
    # A whole path: transformers prefers a file of that name in the working directory to the one in the folder.
    return str(folder), str(folder / found[0])


def is_gguf(target: Any, given: str | None) -> bool:
    """Whether a target is the name of a GGUF file. given: the load option gguf_file. Raises as `find_gguf`."""
    return isinstance(target, (str, Path)) and find_gguf(resolve(target), given)[1] is not None


def absent(name: str) -> str:
    """What is wrong with a name that neither a folder here nor a model of the hub can have, in words; else ""."""
    text = resolve(name)
    if os.path.exists(text) or _HUB_NAME.fullmatch(text):
        return ""
    return "there is no folder of that name"


def model_name(name: str) -> str:
    """The name of a target, from a command; checked before anything heavy is imported. Raises ModelLoadError."""
    if reason := absent(name) or misspelt(name):
        raise ModelLoadError(f"cannot load the target model {short(name)}: {reason}.\n{give_model()}")
    return name


def draft_name(name: str) -> str:
    """The value of `draft`, from a command; checked before anything heavy is imported. Raises HeadLoadError."""
    for part in [name] if os.path.exists(name) else map(str.strip, name.split(",")):
        if part not in (*DRAFT_WORDS, "none") and (reason := absent(part) or misspelt_draft(part)):
            raise HeadLoadError(f"cannot load the head {short(part)}: {reason}")
    return name


def give_model() -> str:
    """What names a target, for messages."""
    return (
        "Give a folder, a GGUF file, a hub name, or a built-in name "
        f"({', '.join(BUILTIN_HEADS[AUTO_HEAD])}); a folder holds config.json, the weights and the tokenizer."
    )


def resolve(name: ModelName) -> str:
    """A built-in model's name -> its folder; ~ is the home folder; the rest stays (a local folder or a hub name)."""
    text = str(name)
    return str(builtin_path(text)) if text in builtin_names() and not os.path.exists(text) else os.path.expanduser(text)


def builtin_name(target: ModelName | None) -> str | None:
    """The built-in model that this name or folder is; None where it is none.

    A model loaded from a built-in folder is found by that folder, which transformers keeps as `name_or_path`.
    """
    if target is None:
        return None
    folder = Path(resolve(target)).resolve()
    return next((name for name in builtin_names() if builtin_path(name).resolve() == folder), None)


def head_for(target: ModelName | None, gguf_file: str | None = None, word: str = AUTO_HEAD) -> str | None:
    """The built-in head for a target, by its name; None where there is none. word: of BUILTIN_HEADS.

    Raises as `find_gguf`.
    """
    if target is None:
        return None
    if (own := builtin_name(target)) is not None or word != AUTO_HEAD:
        return BUILTIN_HEADS[word].get(own or "")
    name = Path(find_gguf(resolve(target), gguf_file)[1] or target).name.lower()
    return next((head for known, head in PUBLISHED_HEADS.items() if name.startswith(known.lower())), None)


def is_available(target: str) -> bool:
    """Whether a target lies on this machine: a built-in one, a folder, a file, or a hub model in the local cache."""
    return os.path.exists(resolve(target)) or bool(_config_of(target))


def target_of_head(head: ModelName) -> str | None:
    """The target that a head (folder, or hub name) was made for, by its own files: a built-in head's, the checkpoint
    that holds a module, or the one that config.json names. None where they name none.

    Raises:
        HeadLoadError: the files cannot be read.
    """
    from drafters.families import family_of

    built_in = builtin_name(head)
    targets = (target for heads in BUILTIN_HEADS.values() for target, own in heads.items() if built_in == own)
    return next(targets, None) or family_of(head).code().target_of(head)


@dataclass(frozen=True)
class Pair:
    """A target and the head that drafts for it. named_by: the head whose config.json named the target, or None."""

    target: Any
    draft: Any
    named_by: str | None = None

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Add the origin of the target's name to a ModelLoadError or HeadMismatchError raised inside."""
        try:
            yield
        except (HeadMismatchError, ModelLoadError) as error:
            if self.named_by is None:
                raise
            raise type(error)(
                f"{error}\nThe target is {short(self.target)}, a name from config.json of the head "
                f"{short(self.named_by)}, which was given alone. For another target, or a copy of that one elsewhere, "
                "give its folder as the target and the head as draft=…"
            ) from error


def pair_of(target: Any, draft: Any, revision: str | None = None) -> Pair:
    """The target and head that a user named; of a head given alone as the target, the target that it names.

    draft="auto" with a head as the target means that head, as it means the built-in head of a built-in target. Heads of
    the package speculators (`speculators_config.verifier`) and of DeepSpec name their target.

    Raises:
        InvalidInputError: a revision with a head given alone, which has none for its target.
    """
    given = draft is not None and not (isinstance(draft, (str, Path)) and str(draft) == AUTO_HEAD)
    if given or not isinstance(target, (str, Path)):
        return Pair(target, draft)
    from drafters.families import FAMILIES
    from specdec.loading.progress import log

    config = _config_of(str(target))
    families = [family for family in FAMILIES.values() if family.names_targets]
    named = next(filter(None, (family.optional("named_target", config) for family in families)), None)
    if named is None:
        return Pair(target, draft)
    if revision is not None:
        raise InvalidInputError(
            f"revision={revision!r}: {short(str(target))} is a head, whose config.json names the target {named!r}; "
            "give that as the target, with its revision, and the head as draft"
        )
    log.info("%s is a draft head; its config.json names the target: %s", target, named, extra={"aside": True})
    return Pair(named, target, str(target))


def load_pair(target: Any, draft: Any, revision: str | None, load: Callable[[Any], Loaded]) -> tuple[Loaded, Pair]:
    """Load the target of `pair_of` by `load`, a name or a loaded model; returns the result of `load`, and the pair.

    A head's configuration is not fetched from the hub here: transformers has already put it into the local cache when
    it refuses the head as a target. So `pair_of` is called again after such an error.

    Raises:
        ModelLoadError, InvalidInputError: see `pair_of`; what `load` raises.
    """
    pair = pair_of(target, draft, revision)
    try:
        with pair.explained():
            return load(pair.target), pair
    except ModelLoadError:
        later = pair_of(target, draft, revision)
        if later.named_by == pair.named_by:
            raise
    with later.explained():
        return load(later.target), later


def _config_of(name: str) -> Fields:
    """config.json of a folder or hub model; {} where none can be read here, which loading it will report."""
    from transformers.utils import cached_file

    from drafters.checkpoints.tensor_files import read_json

    try:
        file = cached_file(resolve(name), "config.json", local_files_only=True)
        return {} if file is None else read_json(Path(file))
    except (OSError, ValueError, HeadLoadError):
        return {}
