"""The built-in models: each is a folder of `specdec/models/`, with a config.json, weights and a card."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from specdec.errors import InvalidInputError

GSM_LLAMA = "gsm-llama"
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
