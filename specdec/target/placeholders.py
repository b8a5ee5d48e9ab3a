"""The token ids that stand for an image, a video or sound in a model's prompts: only text is served."""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedConfig

_FIELD = re.compile(r"(image|video|audio|speech)_(token|patch)_(id|index)")


def placeholders(config: Any) -> dict[int, str]:
    """Token id -> the field that names it, of a configuration and those inside it; {} for a model of text alone."""
    found: dict[int, str] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            found |= placeholders(value)
        elif _FIELD.fullmatch(name) and isinstance(value, int) and value >= 0:
            found[value] = name
    return found
