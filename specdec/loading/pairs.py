"""A head's name given alone, in the place of a target: the target is the one that the head's own config.json names."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import try_to_load_from_cache

from drafters.checkpoints.hub import is_hub_name, looks_local
from drafters.checkpoints.tensor_files import what_else
from drafters.eagle3.formats import target_named_by
from specdec.errors import HeadMismatchError, InvalidInputError, ModelLoadError
from specdec.loading.progress import log
from specdec.values import short

GSM_LLAMA = "gsm-llama"
AUTO_HEAD = "auto"
"""The head that belongs to what was given as the target: a built-in one's, or the head itself that was given alone."""
BUILTIN_HEADS = {GSM_LLAMA: "gsm-llama-eagle3", "gsm-deepseek": "gsm-deepseek"}
"""Built-in targets, and the head that draft="auto" means for each."""

_ROOT = Path(str(files("specdec"))) / "models"


def builtin_names() -> tuple[str, ...]:
    """Names of the built-in models that this installation holds, sorted."""
    return tuple(sorted(config.parent.name for config in _ROOT.glob("*/config.json")))


def builtin_path(name: str) -> Path:
    """Folder of a built-in model, to be given to `from_pretrained`.

    Raises:
        InvalidInputError: there is no built-in model of that name.
    """
    if name not in builtin_names():
        raise InvalidInputError(
            f"There is no built-in model {name!r}. Built in are: {', '.join(builtin_names()) or 'none'}. "
            "Give one of these names or the path of a model folder."
        )
    return _ROOT / name


def resolve(name: str | Path) -> str:
    """A built-in model's name -> its folder; ~ is the home folder; the rest stays (a local folder or a hub name)."""
    text = str(name)
    return str(builtin_path(text)) if text in builtin_names() and not os.path.exists(text) else os.path.expanduser(text)


def builtin_name(target: str | Path | None) -> str | None:
    """The built-in model that this name or folder is; None where it is none.

    A model loaded from a built-in folder is known by that folder: transformers keeps it as `name_or_path`.
    """
    if target is None:
        return None
    folder = Path(resolve(target)).resolve()
    return next((name for name in builtin_names() if builtin_path(name).resolve() == folder), None)


def has_builtin_head(target: str | Path) -> bool:
    """Whether draft="auto" means something for this target."""
    return builtin_name(target) in BUILTIN_HEADS


_CONFIG = "config.json"
Loaded = TypeVar("Loaded")


@dataclass(frozen=True)
class Pair:
    """A target and the head that drafts for it.

    named_by: the head whose config.json named the target, or None where a user did.
    """

    target: Any
    draft: Any
    named_by: str | None = None

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say of a target that cannot be loaded, or that the head does not fit, where its name is from.

        Raises:
            ModelLoadError, HeadMismatchError: the same with that said.
        """
        try:
            yield
        except HeadMismatchError as error:
            if self.named_by is None:
                raise
            raise HeadMismatchError(
                f"{error}\nThe target is {short(self.target)}, a name from config.json of the head "
                f"{short(self.named_by)}, which was given alone. For another target, give it as the target and the "
                "head as draft=…"
            ) from error
        except ModelLoadError as error:
            if self.named_by is None:
                raise
            raise ModelLoadError(
                f"{error}\nThe name is from config.json of the head {short(self.named_by)}, which was given alone. For "
                "a copy of that target elsewhere, give its folder as the target and the head as draft=…"
            ) from error


def pair_of(target: Any, draft: Any, revision: str | None = None) -> Pair:
    """The target and head that a user named; of a head given alone as the target, the target that it names.

    draft="auto" beside a head means that head, as it means the built-in one beside a built-in target. Such names are
    in heads of the package speculators (`speculators_config.verifier`) and of DeepSpec.

    Raises:
        InvalidInputError: a revision beside a head given alone, which has none for its target.
    """
    given = draft is not None and not (isinstance(draft, (str, Path)) and str(draft) == AUTO_HEAD)
    if given or not isinstance(target, (str, Path)):
        return Pair(target, draft)
    named = target_named_by(_config_of(resolve(target)))
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
    """Load the target of `pair_of`; returns what `load` gives, and the pair.

    The hub is not asked for a head's configuration: transformers has fetched that into the local cache by the time it
    refuses the head as a target.

    Args:
        load: loads a target by its name, or takes it as it is.

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


def _config_of(name: str) -> Mapping[str, Any]:
    """config.json of a folder or hub model; {} where there is none to be read, which whoever loads it will say."""
    try:
        file = _config_file(name)
        config = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def _config_file(name: str) -> str | None:
    if os.path.isdir(name):
        file = os.path.join(name, _CONFIG)
        return None if what_else(file) else file
    if os.path.exists(name) or looks_local(name) or not is_hub_name(name):
        return None
    cached = try_to_load_from_cache(name, _CONFIG)
    return cached if isinstance(cached, str) else None
