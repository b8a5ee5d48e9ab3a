"""Defaults of devices, dtypes, K and the longest request. The KV cache: `groups`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from attention.hf.model_specific import dense_up_to
from drafters.base import Head
from specdec.errors import InvalidInputError
from specdec.options import LoadOptions
from specdec.rounds.extras import RoundExtra
from specdec.user_warnings import warn_user
from specdec.values import short
from specdec.wrapped.long_rope import find_long_rope

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def resolve_device(device: Any) -> torch.device:
    """The chosen device (a name, a torch.device, or the index of a GPU); by default CUDA if available.

    Raises:
        InvalidInputError: the name is no device of torch, or the device is not supported or not present.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    allowed = f"allowed are cpu{_cuda_devices()}"
    # bool first: it is an int, and True would be GPU 1.
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        raise InvalidInputError(f"device={short(device)} ({type(device).__name__}): {allowed}")
    try:
        place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise InvalidInputError(f"device={short(device)} is not a torch device: {allowed}") from error
    if place.type == "cpu":
        return torch.device("cpu")
    if place.type != "cuda":
        raise InvalidInputError(f"device={short(device)}: CPU and CUDA are supported; {allowed}")
    if not torch.cuda.is_available():
        raise InvalidInputError(f"device={short(device)}: torch finds no CUDA device on this machine; {allowed}")
    if place.index is not None and place.index >= torch.cuda.device_count():
        raise InvalidInputError(f"device={short(device)}: this machine has no such GPU; {allowed}")
    return place


def resolve_dtype(dtype: Any, device: torch.device) -> torch.dtype | str:
    """A torch dtype; "auto" is float32 on CPU and the checkpoint's own on a GPU.

    Raises:
        InvalidInputError: no dtype of models.
    """
    if isinstance(dtype, str) and dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in _DTYPES.values():
        raise InvalidInputError(f"dtype={short(dtype)}: allowed are auto, {', '.join(_DTYPES)}")
    return found


def _cuda_devices() -> str:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "".join([", cuda", *(f", cuda:{i}" for i in range(count))]) if count else " (there is no CUDA device here)"


DEFAULT_DRAFTS, LOOKUP_DRAFTS = 5, 8


def num_drafts(asked: int | None, head: Head | None, lookup: bool = False) -> int:
    """K: the given one, else 5 with a head, 8 with drafts by lookup alone, and 0 without drafts.

    Raises:
        InvalidInputError: drafts that nothing makes.
    """
    if asked and head is None and not lookup:
        raise InvalidInputError(
            f'num_speculative_tokens={asked} needs a draft head: give draft=… ("lookup" needs none)'
        )
    if asked is not None:
        return asked
    return DEFAULT_DRAFTS if head is not None else LOOKUP_DRAFTS if lookup else 0


def max_model_len(asked: int | None, model: PreTrainedModel) -> int:
    """Most tokens of one request: the given limit, else the model's own limit.

    Rotary embeddings of type dynamic depend on the largest position of the whole batch: one long request would change
    the others. So with them no request may be longer than the length from which they change. The same holds for type
    longrope, except where each token gets its own factors (`specdec.wrapped.long_rope`), in all known modules. Sparse
    attention with an indexer is served up to the length from which it is sparse (`hf.model_specific`), with a
    SpecdecWarning.

    Raises:
        InvalidInputError: more than the model was made for, or the model has no limit.
    """
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    if asked is None and most is None:
        raise InvalidInputError("the model has no longest sequence in its configuration; give max_model_len=…")
    if asked is not None and most is not None and asked > most:
        raise InvalidInputError(f"max_model_len={asked}: the model was made for at most {most} positions")
    kind, original = ("", None) if find_long_rope(model) is not None else _changing_rope(config)
    if asked is not None and original is not None and asked > original:
        raise InvalidInputError(
            f"max_model_len={asked}: beyond {original} positions the model's rotary embedding ({kind}) changes for all "
            f"rows of a batch at once; allowed is {original} or less"
        )
    dense = dense_up_to(model)
    if asked is not None and dense is not None and asked > dense:
        raise InvalidInputError(
            f"max_model_len={asked}: beyond index_topk={dense} tokens the model attends to the keys that its indexer "
            f"chooses, which is not served; up to there it attends to all. Allowed is {dense} or less"
        )
    if asked is not None:
        return asked
    length = min(n for n in (most, original) if n is not None)
    if dense is not None and dense < length:
        warn_user(
            f"{type(model).__name__} takes requests of up to index_topk={dense} tokens instead of {length}: beyond, it "
            "attends to the keys that its indexer chooses, which is not served. max_model_len says so from now on"
        )
        return dense
    return int(length)


def long_rope_extras(model: PreTrainedModel, longest: int) -> tuple[RoundExtra, ...]:
    """The extra of a longrope model whose requests may exceed the reach of its short factors; else ()."""
    found = find_long_rope(model)
    if found is None or longest <= found.rule.original:
        return ()
    from specdec.extras.long_factors import LongFactors

    return (LongFactors(found.rule),)


def lookup_extras(options: LoadOptions, greedy: bool) -> tuple[RoundExtra, ...]:
    """The extra of drafts by lookup, `greedy` for greedy requests alone.

    Raises:
        InvalidInputError: its longest match is shorter than its shortest.
    """
    from specdec.extras.lookup_drafts import LookupDrafts

    if options.lookup_max < options.lookup_min:
        raise InvalidInputError(
            f"lookup_max={options.lookup_max}: allowed is lookup_min={options.lookup_min} or more, up to which tokens "
            "of a match are compared"
        )
    return (LookupDrafts(options.lookup_min, options.lookup_max, options.lookup_shared, greedy),)


def _changing_rope(config: PreTrainedConfig) -> tuple[str, int | None]:
    """The type of a rotary embedding that depends on the batch's longest row, and the last length before it does."""
    own = getattr(config, "rope_parameters", None) or {}
    for parameters in (own, *(p for p in own.values() if isinstance(p, dict))):
        if (kind := parameters.get("rope_type")) in ("longrope", "dynamic"):
            return kind, int(parameters.get("original_max_position_embeddings") or config.max_position_embeddings)
    return "", None
