"""What goes wrong in transformers while a model or a tokenizer is read, as a `ModelLoadError` with what to do.

Its own messages recommend options of its own (`weights_only=False`, `ignore_mismatched_sizes=True`, `token=…`) that
this library does not have: they are left out, the error itself stays as the cause.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError

from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError, StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError

from drafters.checkpoints.hub import HTTP_ERRORS, NO_ANSWER
from specdec.errors import ModelLoadError, SpecdecError
from specdec.loading.checkpoint import Checkpoint

_ERRORS: tuple[type[BaseException], ...] = (
    *HTTP_ERRORS,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    SyntaxError,
    TemplateError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)
"""Files may hold anything: what a wrong value in one of them makes transformers raise is any of Python's own errors."""

_FOREIGN_OPTION = re.compile(r"\b(?!trust_remote_code\b|revision\b)\w+`?\s?=\s?[`'\"<\w]")
_ADVICE = re.compile(
    r"\b(weights_only|use_safetensors|token|use_auth_token|ignore_mismatched_sizes|from_tf|from_flax|force_download|"
    r"local_files_only|device_map|low_cpu_mem_usage|strict)\b"
)
"""Options of transformers and torch that their messages recommend."""
_MOST_LETTERS = 600


@contextmanager
def loading_named(checkpoint: Checkpoint, what: str) -> Iterator[None]:
    """Turn what transformers raises inside into a ModelLoadError.

    Args:
        what: what is read, for the message: "the target model", "the tokenizer".

    Raises:
        ModelLoadError: with the name that was given, the reason, and what to do.
    """
    try:
        yield
    except SpecdecError:
        raise
    except _ERRORS as error:
        raise ModelLoadError(f"cannot load {what} {checkpoint.name!r}: {_reason(error, checkpoint)}") from error


def _reason(error: BaseException, checkpoint: Checkpoint) -> str:
    chain = list(_chain(error))
    if any(isinstance(e, pickle.UnpicklingError) for e in chain):
        return (
            "its weights are a damaged pickle, or one of more than tensors, which could run code and is never read; "
            "use weights in safetensors"
        )
    if any(isinstance(e, GatedRepoError) for e in chain):
        return "access needs a login: accept the terms on its page, then `hf auth login`, or set HF_TOKEN"
    if any(isinstance(e, RevisionNotFoundError) for e in chain):
        return f"the hub has no revision {checkpoint.revision!r} of it"
    if any(isinstance(e, RepositoryNotFoundError) for e in chain):
        return "it is no folder, and the hub has no such model (a private one needs `hf auth login`, or HF_TOKEN)"
    if checkpoint.local_files_only:
        return f"it is no folder, and the Hugging Face hub gave nothing: {NO_ANSWER}"
    if isinstance(error, (SafetensorError, EOFError)):
        return f"a file of its weights is damaged or incomplete ({_plain(error)}); download it again"
    if isinstance(error, JSONDecodeError):
        return f"one of its JSON files is damaged ({_plain(error)}); download it again"
    if isinstance(error, ImportError):
        return f"a package is missing: {_plain(error)}"
    if isinstance(error, MemoryError):
        return "this machine has not enough memory for it"
    if isinstance(error, (KeyError, AttributeError, TypeError, AssertionError, IndexError, ArithmeticError)):
        return f"a value in its configuration or weight files is wrong ({type(error).__name__}: {_plain(error)})"
    return _plain(error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from."""
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        seen.append(link)
        yield link
        link = link.__cause__ or link.__context__


def _plain(error: BaseException) -> str:
    """The error's words on one line, without sentences that recommend an option this library lacks.

    Where no other is left they say what is wrong ("`tie_word_embeddings=True` is not supported …"), and stay without
    those that name such an option.
    """
    sentences = [s for s in re.split(r"(?<=[.!?])\s+|\n+", str(error).strip()) if s]
    kept = [s for s in sentences if not _FOREIGN_OPTION.search(s)] or [s for s in sentences if not _ADVICE.search(s)]
    text = " ".join(kept) or f"{type(error).__name__}, without a reason"
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"
