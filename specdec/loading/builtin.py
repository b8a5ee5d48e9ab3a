"""Names of models. A built-in one is a folder of `specdec/models/`, with a config.json, weights and a card."""

from __future__ import annotations

import os
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from specdec.errors import InvalidInputError

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


def misspelt(name: str | Path) -> str:
    """What is wrong with a name that is nearly a built-in model's, in words; "" where it is none, or means a folder."""
    text = str(name)
    close = get_close_matches(text, builtin_names(), 1, 0.8)
    if not close or text in builtin_names() or os.path.exists(os.path.expanduser(text)):
        return ""
    return (
        f"there is no folder of that name; did you mean {close[0]!r}? Built in are {', '.join(builtin_names())}; "
        "models of the hub are given as owner/name"
    )


def resolve(name: str | Path) -> str:
    """A built-in model's name -> its folder; ~ is the home folder; the rest stays (a local folder or a hub name)."""
    text = str(name)
    return str(builtin_path(text)) if text in builtin_names() and not os.path.exists(text) else os.path.expanduser(text)


def builtin_name(target: str | Path | None) -> str | None:
    """The built-in model that this name or folder is; None where it is none.

    A model loaded from a built-in folder is found by that folder, which transformers keeps as `name_or_path`.
    """
    if target is None:
        return None
    folder = Path(resolve(target)).resolve()
    return next((name for name in builtin_names() if builtin_path(name).resolve() == folder), None)
