"""A head given alone in place of a target: the target is then the one that the head's own config.json names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import try_to_load_from_cache

from drafters.checkpoints.tensor_files import is_hub_name, looks_local, what_else
from drafters.families import FAMILIES
from specdec.errors import HeadMismatchError, InvalidInputError, ModelLoadError
from specdec.loading.builtin import AUTO_HEAD, resolve
from specdec.loading.checkpoint import object_in
from specdec.loading.progress import log
from specdec.values import short

_CONFIG = "config.json"
Loaded = TypeVar("Loaded")


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
            if isinstance(error, HeadMismatchError):
                raise HeadMismatchError(
                    f"{error}\nThe target is {short(self.target)}, a name from config.json of the head "
                    f"{short(self.named_by)}, which was given alone. For another target, give it as the target and the "
                    "head as draft=…"
                ) from error
            raise ModelLoadError(
                f"{error}\nThe name is from config.json of the head {short(self.named_by)}, which was given alone. For "
                "a copy of that target elsewhere, give its folder as the target and the head as draft=…"
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
    config = _config_of(resolve(target))
    # Heads that lie in their target's checkpoint name no other, so their family's code need not be imported.
    families = [family for family in FAMILIES.values() if family.in_target is None]
    named = next(filter(None, (family.code().named_target(config) for family in families)), None)
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


def _config_of(name: str) -> Mapping[str, Any]:
    """config.json of a folder or hub model; {} where none can be read, which loading it will report."""
    try:
        file = _config_file(name)
    except (OSError, ValueError):
        return {}
    return {} if file is None else object_in(file)


def _config_file(name: str) -> str | None:
    if os.path.isdir(name):
        file = os.path.join(name, _CONFIG)
        return None if what_else(file) else file
    if os.path.exists(name) or looks_local(name) or not is_hub_name(name):
        return None
    cached = try_to_load_from_cache(name, _CONFIG)
    return cached if isinstance(cached, str) else None
