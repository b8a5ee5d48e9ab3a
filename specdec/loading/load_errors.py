"""Errors of transformers while a model or a tokenizer is read, turned into a `ModelLoadError` that names the remedy.

Their own messages recommend options (`weights_only=False`, `ignore_mismatched_sizes=True`, `token=…`) that this library
does not have: these are left out, the error itself stays as the cause.
"""

from __future__ import annotations

import pickle
import re
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from json import JSONDecodeError

from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError, StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError
from torch import nn

from drafters.checkpoints.tensor_files import HTTP_ERRORS, NO_ANSWER
from specdec.errors import UNNAMED_ERRORS, HeadLoadError, ModelLoadError, SpecdecError
from specdec.interrupts import causes
from specdec.loading.checkpoint import Checkpoint
from specdec.values import Fields

_SHOWN = 3
_MODULE_PARTS = ("enorm", "hnorm", "eh_proj")
"""Tensors by which a layer after the last is a multi-token-prediction module (names of DeepSeek-V3 and GLM-4.5)."""
_NUMBERED = re.compile(r"^(?P<list>.+)\.(?P<number>\d+)\.(?P<rest>.+)$")
_TRAINED = (".weight", ".bias")
_QUANTISED = (".weight_scale", ".weight_scale_2", ".weight_scale_inv", ".weight_packed", ".qweight", ".SCB")
"""Names of tensors that quantised linear layers have in addition to `weight`, or instead: they give it its meaning."""


def check_complete(model: nn.Module, info: Fields) -> None:
    """Check that a target is all of its checkpoint, and no more.

    info: transformers' loading information (`output_loading_info=True`). Tied weights, and what the model's class or a
    quantizer makes itself, are not among its `missing_keys`.

    Raises:
        ModelLoadError: tensors are missing, have another shape, or belong to decoder layers, or parts of them, that
            the configuration does not have. Other surplus tensors (scales of an 8-bit cache, value heads, image towers)
            change nothing that the model computes; transformers reports them.
    """
    problems = (
        (info["missing_keys"], "missing from the checkpoint and would be random numbers"),
        (
            [
                f"{key}: {list(stored)} in the checkpoint, {list(wanted)} by the configuration"
                for key, stored, wanted in info["mismatched_keys"]
            ],
            "of another shape",
        ),
        (
            _surplus_in_layers(model, info["unexpected_keys"]),
            "in the checkpoint, but the configuration has no place for them in the decoder's layers",
        ),
        (
            _surplus_in_layers(model, info["unexpected_keys"], _QUANTISED),
            "of quantised weights (scales, packed numbers) that nothing reads, as config.json does not say how",
        ),
        (info.get("error_msgs"), "not loaded"),
    )
    if found := "; ".join(_listed(names, what) for names, what in problems if names):
        raise ModelLoadError(
            f"the checkpoint does not fit its configuration: {found}.\nLook whether config.json "
            "(num_hidden_layers, sizes, biases) is the one that belongs to these weights, and whether all files of the "
            "checkpoint are there. To use the model nevertheless, load it with transformers and pass the loaded model."
        )


def _listed(names: Collection[str], what: str) -> str:
    """'2 tensors missing …: a, b'.

    >>> _listed({"b", "a"}, "missing")
    '2 tensors missing (a, b)'
    >>> _listed(["a", "b", "c", "d", "e"], "missing")
    '5 tensors missing (a, b, c and 2 more)'
    """
    first = sorted(names)[:_SHOWN]
    more = f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} {what} ({', '.join(first)}{more})"


def _surplus_in_layers(model: nn.Module, unexpected: Collection[str], endings: tuple[str, ...] = _TRAINED) -> list[str]:
    """Tensors with such endings that belong into the model's own lists of layers, prediction modules left out."""
    lists = {found["list"] for key, _ in model.named_parameters() if (found := _NUMBERED.match(key))}
    prefix = getattr(model, "base_model_prefix", "")
    lists |= {key.removeprefix(f"{prefix}.") for key in lists}
    inside = {key: found for key in unexpected if (found := _NUMBERED.match(key)) and found["list"] in lists}
    modules = {(m["list"], m["number"]) for m in inside.values() if m["rest"].startswith(_MODULE_PARTS)}
    return [key for key, m in inside.items() if key.endswith(endings) and (m["list"], m["number"]) not in modules]


_ERRORS: tuple[type[BaseException], ...] = (
    *HTTP_ERRORS,
    *UNNAMED_ERRORS,
    EOFError,
    MemoryError,
    SafetensorError,
    StrictDataclassError,
    SyntaxError,
    TemplateError,
    pickle.UnpicklingError,
    struct.error,
)
"""Files may hold anything: on a wrong value transformers may raise any of Python's own errors."""

_FOREIGN_OPTION = re.compile(r"\b(?!trust_remote_code\b|revision\b)\w+`?\s?=\s?[`'\"<\w]")
_ADVICE = re.compile(
    r"\b(weights_only|use_safetensors|token|use_auth_token|ignore_mismatched_sizes|from_tf|from_flax|force_download|"
    r"local_files_only|device_map|low_cpu_mem_usage|strict)\b"
)
"""Options of transformers and torch that their messages recommend."""
_MOST_LETTERS = 600
_GGUF = (
    "download the GGUF file again if it is incomplete; else take the model in safetensors, or a newer transformers; "
    "for a tokenizer alone give tokenizer=…"
)


_OF_THE_HUB_OR_PICKLE: dict[type[Exception], str] = {
    pickle.UnpicklingError: "its weights are a damaged pickle, or one of more than tensors, which could run code and is"
    " never read; use weights in safetensors",
    GatedRepoError: "access needs a login: accept the terms on its page, then `hf auth login`, or set HF_TOKEN",
    RevisionNotFoundError: "the hub has no revision {!r} of it",
    RepositoryNotFoundError: "it is no folder, and the hub has no such model (a private one needs `hf auth login`, or "
    "HF_TOKEN)",
}


_REASONS: dict[tuple[type[Exception], ...], str] = {
    (SafetensorError, EOFError): "a file of its weights is damaged or incomplete ({}); download it again",
    (JSONDecodeError,): "one of its JSON files is damaged ({}); download it again",
    (ImportError,): "a package is missing: {}",
    (MemoryError,): "this machine has not enough memory for it",
    (KeyError, AttributeError, TypeError, AssertionError, IndexError, ArithmeticError): "a value in its configuration "
    "or weight files is wrong ({1}: {0})",
}


@contextmanager
def loading_named(checkpoint: Checkpoint, what: str) -> Iterator[None]:
    """Turn what transformers and the readers of files raise inside into a ModelLoadError, and name what was to be read.

    Raises:
        ModelLoadError: `what` ("the target model", "the tokenizer") with the given name, the reason, and a remedy.
    """
    try:
        yield
    except ModelLoadError as error:
        raise ModelLoadError(f"cannot load {what} {checkpoint.name!r}: {error}") from error
    except HeadLoadError as error:  # of the functions that read heads' files, too
        raise ModelLoadError(f"cannot load {what} {checkpoint.name!r}: {error}; download it again") from error
    except SpecdecError:
        raise
    except _ERRORS as error:
        raise ModelLoadError(f"cannot load {what} {checkpoint.name!r}: {_reason(error, checkpoint)}") from error


def _reason(error: BaseException, checkpoint: Checkpoint) -> str:
    chain = list(causes(error))
    for kind, reason in _OF_THE_HUB_OR_PICKLE.items():
        if any(isinstance(link, kind) for link in chain):
            return reason.format(checkpoint.revision)
    if checkpoint.local_files_only:
        return f"it is no folder, and the Hugging Face hub gave nothing: {NO_ANSWER}"
    # The error's message on one line, without sentences that recommend an option this library lacks. If none would be
    # left, they describe the fault ("`tie_word_embeddings=True` is not supported …"), and stay.
    sentences = [s for s in re.split(r"(?<=[.!?])\s+|\n+", str(error).strip()) if s]
    kept = [s for s in sentences if not _FOREIGN_OPTION.search(s)] or [s for s in sentences if not _ADVICE.search(s)]
    text = " ".join(kept) or f"{type(error).__name__}, without a reason"
    said = text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}…"
    for kinds, reason in _REASONS.items():
        if isinstance(error, kinds):
            return reason.format(said, type(error).__name__)
    return said if checkpoint.gguf_file is None else f"{said.rstrip('.')}; {_GGUF}"
