"""Checks that sizes fit into memory, in numbers, before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch

from attention.hf.weights import stored_bytes
from specdec.config import EngineConfig
from specdec.errors import CacheTooSmallError, InvalidInputError, ModelLoadError, OutOfDeviceMemoryError

_RESERVE_BYTES = 4 << 30
"""Memory of a GPU that is left for activations and CUDA graphs."""
_ID_BYTES = 4
_ARENA_COPIES = 2
"""Host buffers of a staging arena: the next round is written while the last one is still copied."""
_LARGEST_USUAL_PAGE = 256
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""Words of torch's host allocators, in a plain RuntimeError."""


def host_bytes() -> int | None:
    """Memory of this machine; None where the system does not report it (Windows)."""
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_counts(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int | None) -> None:
    """Check counts that no model could have together, before anything is read.

    Raises:
        InvalidInputError: fewer tokens in a forward than requests in a batch, or see `check_tables_fit`.
    """
    if max_num_batched_tokens < max_num_seqs:
        raise InvalidInputError(
            f"max_num_batched_tokens={max_num_batched_tokens}: {max_num_seqs} requests (max_num_seqs) with one token "
            "each need as many; lower max_num_seqs or raise it"
        )
    check_tables_fit(max_num_seqs, max_model_len or 1)


def check_page_size(page_size: int, max_model_len: int | None) -> None:
    """Check that a request can fill a page.

    Raises:
        InvalidInputError: pages are longer than requests, and than usual.
    """
    most = max(max_model_len or page_size, _LARGEST_USUAL_PAGE)
    if page_size > most:
        raise InvalidInputError(
            f"page_size={page_size}: a page is longer than a request can be (max_model_len={max_model_len}), and every "
            f"request holds at least one; allowed is {most} or less, usual are 1 to 64"
        )


def check_tables_fit(rows: int, length: int) -> None:
    """Check that a token table [max_num_seqs, max_model_len] fits into the machine's memory.

    Raises:
        InvalidInputError: it does not.
    """
    needed, total = rows * (length + 1) * _ID_BYTES, host_bytes()
    if total is not None and needed > total:
        raise InvalidInputError(
            f"max_num_seqs={rows}, max_model_len={length}: a table of that many token ids takes {_gib(needed)}; this "
            f"machine has {_gib(total)}; lower max_num_seqs or max_model_len"
        )


def check_sizes_fit(
    config: EngineConfig,
    device: torch.device,
    token_bytes: int,
    staging_bytes: int,
    windowed_bytes: int = 0,
    state_bytes: int = 0,
) -> None:
    """Check that memory can hold these sizes, before the first of them is allocated.

    token_bytes: bytes of a token in the KV caches of target and head, without windowed groups. staging_bytes: a buffer
    for the largest round. state_bytes: the recurrent states of all rows.

    Raises:
        CacheTooSmallError: the KV caches are larger than a GPU's free memory, or the machine's memory.
        InvalidInputError: the engine's tables and staging buffers are larger than the machine's memory.
    """
    check_tables_fit(config.max_num_seqs, config.max_model_len)
    pages, page = config.num_pages, config.page_size
    what = f"a KV cache of {pages} pages of page_size={page} tokens"
    check_cache_fits(device, pages * page, token_bytes, what, windowed_bytes, state_bytes)
    needed, total = _ARENA_COPIES * staging_bytes, host_bytes()
    if total is not None and needed > total:
        raise InvalidInputError(
            f"max_num_seqs={config.max_num_seqs}, max_num_batched_tokens={config.max_num_batched_tokens}, "
            f"max_model_len={config.max_model_len}, num_speculative_tokens={config.num_speculative_tokens}: the "
            f"buffers of such a round take {_gib(needed)}; this machine has {_gib(total)}; lower one of them"
        )
    _check_all_fit(config, device, pages * page * token_bytes + windowed_bytes + state_bytes, needed)


def _check_all_fit(config: EngineConfig, device: torch.device, cache_bytes: int, staging_bytes: int) -> None:
    """The same check for everything in this machine's memory together."""
    rows, length, total = config.max_num_seqs, config.max_model_len, host_bytes()
    tables = rows * (length + 1) * _ID_BYTES + rows * -(-length // config.page_size) * _ID_BYTES
    caches = cache_bytes if device.type == "cpu" else 0
    if total is not None and caches + tables + staging_bytes > total:
        raise InvalidInputError(
            f"max_num_seqs={rows}, max_model_len={length}, max_num_batched_tokens={config.max_num_batched_tokens}: "
            f"tables of tokens and pages take {_gib(tables)}, the buffers of the largest round {_gib(staging_bytes)}"
            + (f", KV caches and states {_gib(caches)}" if caches else "")
            + f"; this machine has {_gib(total)}; lower one of them"
            + (", or kv_cache_tokens" if caches else "")
        )


def check_weights_fit(model: torch.nn.Module, device: torch.device, name: str) -> None:
    """Check that a GPU has room for a model's weights before it is moved.

    Raises:
        ModelLoadError: it has not.
    """
    if device.type != "cuda":
        return
    # What is on a GPU already needs no room: a model may be there in part.
    needed = sum(stored_bytes(t) for t in chain(model.parameters(), model.buffers()) if t.device.type != "cuda")
    free, total = torch.cuda.mem_get_info(device)
    if needed > free:
        raise ModelLoadError(
            f"the weights of {name!r} take {_gib(needed)}; {device} has {_gib(free)} of {_gib(total)} free; take a "
            "smaller model, or dtype='bfloat16' where the weights are wider"
        )


def scores_bytes(rows: int, vocab_size: int) -> int:
    """What scores of so many logits rows take where requests have options: a copy in float32, and one it is made from.

    >>> scores_bytes(32 * 6, 128_256)
    197001216
    """
    return 2 * 4 * rows * vocab_size


def cache_room(
    device: torch.device, utilization: float, token_bytes: int, state_bytes: int = 0, scores_bytes: int = 0
) -> int:
    """Bytes for KV caches: free memory less others' share, 4 GiB for activations and graphs, the recurrent states,
    and `scores_bytes`.

    Raises:
        CacheTooSmallError: not even one token fits.
    """
    free, total = torch.cuda.mem_get_info(device)
    room = int(free - (1 - utilization) * total) - _RESERVE_BYTES - state_bytes - scores_bytes
    if room < token_bytes:
        states = f", {_gib(state_bytes)} are the recurrent states of max_num_seqs rows (fewer take less)"
        raise CacheTooSmallError(
            f"no room for a KV cache: {_gib(free)} of {_gib(total)} are free on {device}, "
            f"gpu_memory_utilization={utilization} leaves "
            f"{_gib(max(0, room + _RESERVE_BYTES + state_bytes))} of it, and {_gib(_RESERVE_BYTES)} are reserved for "
            f"activations and graphs{states if state_bytes else ''}; raise gpu_memory_utilization or take a "
            "smaller model"
        )
    return room


def check_cache_fits(
    device: torch.device, tokens: int, token_bytes: int, what: str, windowed_bytes: int = 0, state_bytes: int = 0
) -> None:
    """Check that a KV cache fits into a GPU's free memory, or into the machine's memory.

    Layers with windows or in chunks (`windowed_bytes`) keep no key of most of these tokens. what: the option that the
    tokens come from, for the message.

    Raises:
        CacheTooSmallError: it does not.
    """
    beside = windowed_bytes + state_bytes
    needed = tokens * token_bytes + beside
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        has = f"{_gib(free)} of {_gib(total)} free"
    else:
        free, has = host_bytes() or needed, f"{_gib(host_bytes() or 0)}"
    if needed > free:
        parts = f", {_gib(windowed_bytes)} of it for layers with windows or in chunks" if windowed_bytes else ""
        parts += f", {_gib(state_bytes)} of it for the recurrent states of all rows" if state_bytes else ""
        raise CacheTooSmallError(
            f"{what} takes {_gib(needed)} ({token_bytes} bytes per token{parts}); {device} has {has}: room for "
            f"{max(free - beside, 0) // max(token_bytes, 1)} tokens; lower kv_cache_tokens or page_size"
            + (", or max_num_seqs" if state_bytes else "")
        )


@contextmanager
def memory_named(device: torch.device, cache_tokens: int, cache_bytes: int) -> Iterator[None]:
    """Name the sizes that took the memory if it runs out while the engine is built.

    Raises:
        OutOfDeviceMemoryError: in place of torch's and numpy's errors.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in _NO_MEMORY):
            raise
        now = ""
        if isinstance(error, torch.OutOfMemoryError):  # else the host's memory
            free, total = torch.cuda.mem_get_info(device)
            now = f": {_gib(free)} of {_gib(total)} are free"
        raise OutOfDeviceMemoryError(
            f"{device} ran out of memory while the engine was built{now}; the KV "
            f"caches of {cache_tokens} tokens take {_gib(cache_bytes)}; lower gpu_memory_utilization or "
            f"kv_cache_tokens (smaller caches), max_num_batched_tokens (smaller activations) or max_num_seqs (fewer "
            f"graphs)\n{error}"
        ) from error


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
