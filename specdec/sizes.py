"""How large things are when the user does not say: K, the longest request, the KV cache."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from attention.kv_cache import bytes_per_token
from drafters.base import Head
from specdec.errors import CacheTooSmallError, InvalidInputError
from specdec.target import TargetProbe

DEFAULT_DRAFTS = 5
_CPU_CACHE_BYTES = 1 << 30
_GPU_RESERVE_BYTES = 4 << 30


def num_drafts(asked: int | None, head: Head | None) -> int:
    """K: what was asked for, else 5 with a head and 0 without.

    Raises:
        InvalidInputError: drafts without a head.
    """
    if head is None and asked:
        raise InvalidInputError(f"num_speculative_tokens={asked} needs a draft head: give draft=…")
    if asked is None:
        return 0 if head is None else DEFAULT_DRAFTS
    return asked


def max_model_len(asked: int | None, model: PreTrainedModel) -> int:
    """Most tokens of one request: what was asked for, else the model's own limit.

    Raises:
        InvalidInputError: more than the model was made for, or the model does not say.
    """
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if asked is None:
        if most is None:
            raise InvalidInputError("the model does not say its longest sequence; give max_model_len=…")
        return int(most)
    if most is not None and asked > most:
        raise InvalidInputError(f"max_model_len={asked}: the model was made for at most {most} positions")
    return asked


def cache_tokens(asked: int | None, probed: TargetProbe, head: Head | None, wanted: int, utilization: float) -> int:
    """Tokens of the KV cache: what was asked for, else `wanted`, at most 1 GiB on CPU or what the GPU has left.

    Raises:
        InvalidInputError: a count below 1, or a utilization outside (0, 1].
        CacheTooSmallError: the GPU has no room for a cache.
    """
    if asked is not None:
        if asked < 1:
            raise InvalidInputError(f"kv_cache_tokens={asked}: allowed is 1 or more")
        return asked
    keys = tuple(c.plan_key for c in probed.calls) + (() if head is None else tuple(head.plan_keys))
    token_bytes = bytes_per_token(keys, probed.model.dtype)
    if probed.model.device.type != "cuda":
        return min(wanted, _CPU_CACHE_BYTES // token_bytes)
    return min(wanted, _gpu_room(probed.model.device, utilization, token_bytes) // token_bytes)


def _gpu_room(device: torch.device, utilization: float, token_bytes: int) -> int:
    if not 0 < utilization <= 1:
        raise InvalidInputError(f"gpu_memory_utilization={utilization}: allowed is more than 0, at most 1")
    free, total = torch.cuda.mem_get_info(device)
    room = int(free - (1 - utilization) * total) - _GPU_RESERVE_BYTES
    if room < token_bytes:
        raise CacheTooSmallError(
            f"no room for a KV cache: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free and "
            f"{_GPU_RESERVE_BYTES >> 30} GiB are kept for activations and graphs; raise gpu_memory_utilization="
            f"{utilization} or take a smaller model"
        )
    return room
