"""Device memory at start: what fits, told in numbers, before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch

from specdec.errors import CacheTooSmallError, InvalidInputError, ModelLoadError, OutOfDeviceMemoryError

_RESERVE_BYTES = 4 << 30


def check_weights_fit(model: torch.nn.Module, device: torch.device, name: str) -> None:
    """Refuse to move a model to a GPU that has no room for its weights.

    Raises:
        ModelLoadError: the weights are larger than what is free.
    """
    if device.type != "cuda":
        return
    needed = sum(t.nbytes for t in chain(model.parameters(), model.buffers()) if t.device.type != "cuda")
    free, total = torch.cuda.mem_get_info(device)
    if needed > free:
        raise ModelLoadError(
            f"the weights of {name!r} take {_gib(needed)}; {device} has {_gib(free)} of {_gib(total)} free; take a "
            "smaller model, or dtype='bfloat16' where the weights are wider"
        )


def cache_room(device: torch.device, utilization: float, token_bytes: int) -> int:
    """Bytes for KV caches: what is free less the share that is not ours, and 4 GiB for activations and graphs.

    Raises:
        CacheTooSmallError: not even one token fits.
    """
    free, total = torch.cuda.mem_get_info(device)
    room = int(free - (1 - utilization) * total) - _RESERVE_BYTES
    if room < token_bytes:
        raise CacheTooSmallError(
            f"no room for a KV cache: {_gib(free)} of {_gib(total)} are free on {device}, "
            f"gpu_memory_utilization={utilization} leaves {_gib(max(0, room + _RESERVE_BYTES))} of it, and "
            f"{_gib(_RESERVE_BYTES)} are kept for activations and graphs; raise gpu_memory_utilization or take a "
            "smaller model"
        )
    return room


def check_cache_fits(device: torch.device, tokens: int, token_bytes: int) -> None:
    """Refuse a KV cache of a size asked for that is larger than what is free.

    Raises:
        CacheTooSmallError: it is.
    """
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    if tokens * token_bytes > free:
        raise CacheTooSmallError(
            f"kv_cache_tokens={tokens} takes {_gib(tokens * token_bytes)} ({token_bytes} bytes a token); {device} has "
            f"{_gib(free)} of {_gib(total)} free: room for {free // token_bytes} tokens"
        )


def check_utilization(utilization: float) -> None:
    """Raises InvalidInputError for a share outside (0, 1]."""
    if not 0 < utilization <= 1:
        raise InvalidInputError(f"gpu_memory_utilization={utilization}: allowed is more than 0, at most 1")


@contextmanager
def memory_named(device: torch.device, cache_tokens: int, token_bytes: int) -> Iterator[None]:
    """Tell what took the memory when it runs out while the engine is built.

    Raises:
        OutOfDeviceMemoryError: in place of torch's.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        raise OutOfDeviceMemoryError(
            f"{device} ran out of memory while the engine was built: {_gib(free)} of {_gib(total)} are free; the KV "
            f"caches of {cache_tokens} tokens take {_gib(cache_tokens * token_bytes)}; lower gpu_memory_utilization or "
            f"kv_cache_tokens (smaller caches), max_num_batched_tokens (smaller activations) or max_num_seqs (fewer "
            f"graphs)\n{error}"
        ) from error


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
