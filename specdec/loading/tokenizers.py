"""The tokenizer of a target: the one given, one loaded by name, or the target's own."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.utils.hub import cached_file

from specdec.errors import InvalidInputError, ModelLoadError
from specdec.loading.checkpoint import Checkpoint, find_checkpoint
from specdec.loading.load_errors import loading_named
from specdec.loading.names import ModelName
from specdec.user_warnings import warn_user
from specdec.values import short

_TEMPLATE_FILE = "chat_template.json"
_FILE = re.compile(r"token|vocab|merges|sp(iece|m)\b|sentencepiece|tekken")
"""What the name of any tokenizer's file has in it, of whatever kind."""


def open_tokenizer(tokenizer: Any, checkpoint: Checkpoint | None) -> Any:
    """The tokenizer given (an object, or a folder or hub name to load it from), else the target's own.

    Raises:
        InvalidInputError: neither a tokenizer nor a name to load one by, or an object that is no tokenizer.
        ModelLoadError: it cannot be loaded.
    """
    if isinstance(tokenizer, (str, Path)):
        return load_tokenizer(tokenizer)
    if tokenizer is None:
        if checkpoint is None:
            raise InvalidInputError("the model has no name to load a tokenizer by; give tokenizer=…")
        # In the adapter's folder if one was saved there: its chat template may differ.
        place = checkpoint if checkpoint.adapter is None else checkpoint.adapter.checkpoint
        own = (Path(place.path) / "tokenizer_config.json").is_file()
        return load_tokenizer(place if own else checkpoint)
    lacking = [name for name in ("__call__", "decode") if not callable(getattr(tokenizer, name, None))]
    if lacking or isinstance(tokenizer, type):
        missing = "it is a class" if isinstance(tokenizer, type) else f"it lacks {' and '.join(lacking)}"
        raise InvalidInputError(
            f"tokenizer={short(tokenizer)} is no tokenizer: {missing}; give a transformers tokenizer, or the folder or "
            "hub name of one"
        )
    return tokenizer


def as_chats(tokenizer: Any, prompts: Iterable[Any]) -> list[Any]:
    """Texts as the user's words of a chat, where the tokenizer has a template for chats."""
    if not getattr(tokenizer, "chat_template", None):
        return list(prompts)
    return [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]


def load_tokenizer(name: ModelName | Checkpoint) -> Any:
    """Load a tokenizer by its model's name. Raises ModelLoadError: it cannot be loaded."""
    checkpoint = name if isinstance(name, Checkpoint) else find_checkpoint(name, what="the tokenizer of")
    with loading_named(checkpoint, "the tokenizer of"):
        if checkpoint.is_folder and not any(map(_FILE.search, os.listdir(checkpoint.path))):
            raise ModelLoadError(  # transformers would make an empty tokenizer, or raise that sentencepiece is missing
                "the folder has none (tokenizer.json, tokenizer.model, …); give tokenizer=…, the folder or hub name of "
                "one, or a tokenizer"
            )
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.path, **checkpoint.options)
        if getattr(tokenizer, "chat_template", None) is None:
            tokenizer.chat_template = _processor_template(checkpoint)
    return tokenizer


def _processor_template(checkpoint: Checkpoint) -> str | None:
    """The chat template that older checkpoints keep for their processor alone, or None."""
    options = {**checkpoint.options, "_raise_exceptions_for_missing_entries": False}
    file = cached_file(checkpoint.path, _TEMPLATE_FILE, **options)
    if file is None:
        return None
    template = json.loads(Path(file).read_text(encoding="utf-8"))["chat_template"]
    return template if isinstance(template, str) else None


def warn_of_another_vocabulary(tokenizer: Any, vocab_size: int) -> None:
    """Warn about a tokenizer with more tokens than the target; prompts that use them are refused one by one.

    No error: checkpoints with a padding token after the last row of their embedding are common.
    """
    if hasattr(type(tokenizer), "__len__") and len(tokenizer) > vocab_size:
        warn_user(
            f"the tokenizer has {len(tokenizer)} tokens and the target {vocab_size}: it may be another model's; "
            "prompts with ids beyond the target's vocabulary are refused"
        )
