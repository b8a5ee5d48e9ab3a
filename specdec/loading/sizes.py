"""The sizes of an engine: K, the longest request, the KV cache's division among the target's cache groups, and whether
all of it fits into memory, in numbers, before anything is allocated."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import torch
from transformers import PreTrainedModel

from attention.cache.kv_cache import KVFormat, bytes_per_token
from attention.cache.windowed import most_owned_pages
from attention.groups import layers_by_group, reaches_of
from attention.hf.model_specific import changing_rope, dense_up_to
from attention.hf.weights import stored_bytes
from attention.spec import Reach
from drafters.base import BlockHead, Head, PicksDrafts
from specdec.config import EngineConfig, WindowedPool
from specdec.errors import CacheTooSmallError, InvalidInputError, ModelLoadError, OutOfDeviceMemoryError
from specdec.options import LoadOptions
from specdec.user_warnings import warn_user
from specdec.wrapped.long_rope import find_long_rope
from specdec.wrapped.probing import TargetProbe

DEFAULT_DRAFTS = 5
LOOKUP_DRAFTS = 8
_RESERVE_BYTES = 4 << 30
"""Memory of a GPU that is left for activations and CUDA graphs."""
_ID_BYTES = 4
_ARENA_COPIES = 2
"""Host buffers of a staging arena: the next round is written while the last one is still copied."""
_LARGEST_USUAL_PAGE = 256
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
"""Words of torch's host allocators, in a plain RuntimeError."""
_CPU_CACHE_BYTES = 1 << 30
_LARGE_GPU = 40 << 30
_SOME_TOKENS = 2048
_MANY_TOKENS = 8192
"""Most tokens of a forward, and of one on a GPU with so many bytes. On an H200 a call of 32 prompts of 512 tokens, with
256 new tokens each and K = 3, takes 0.79 of the time with the larger one (gpt-oss-20b shape) or 0.89 (Llama-3.1-8B)."""
_SHARE = 0.25
"""Of the memory, for windowed groups, where rows of max_model_len tokens need less and max_num_seqs rows need more:
most requests are shorter, so that more of them run at once."""
_TESTED_ROWS = 3
_TESTED_TOKENS = 64
"""The self-test's rows, which are read without freeing anything, and more tokens than each has."""


def num_drafts(asked: int | None, head: Head | None, lookup: bool, model: PreTrainedModel) -> int:
    """K: the given one, else 5 with a head, all of a block, of a small model what pays for this target, 8 with drafts
    by lookup alone, and 0 without drafts. A SpecdecWarning where no number pays.

    Raises:
        InvalidInputError: drafts that nothing makes, or more than a block has.
    """
    if asked and head is None and not lookup:
        raise InvalidInputError(
            f'num_speculative_tokens={asked} needs a draft head: give draft=… ("lookup" needs none)'
        )
    if isinstance(head, BlockHead):
        most = head.block_size - head.first_slot
        if asked is not None and asked > most:
            raise InvalidInputError(
                f"num_speculative_tokens={asked}: this head drafts in blocks of {head.block_size} tokens, which give "
                f"{most} drafts; it was not trained for more, which would spoil all of them; give {most} or less"
            )
        return most if asked is None else asked
    if asked is not None:
        return asked
    if isinstance(head, PicksDrafts):
        drafts, speed = head.paying_drafts(model)
        if speed <= 1:
            warn_user(
                f"this draft model is too large for the target: {speed:.2f} times the tokens a second without it are "
                "expected; take a smaller one, or give num_speculative_tokens"
            )
        return drafts
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
    rope = {} if find_long_rope(model) is not None else changing_rope(config)
    original = int(rope.get("original_max_position_embeddings") or config.max_position_embeddings) if rope else None
    dense = dense_up_to(model)
    limits = (
        (most, f"the model was made for at most {most} positions"),
        (
            original,
            f"beyond {original} positions the model's rotary embedding ({rope.get('rope_type')}) changes for all rows "
            f"of a batch at once; allowed is {original} or less",
        ),
        (
            dense,
            f"beyond index_topk={dense} tokens the model attends to the keys that its indexer chooses, which is not "
            f"served; up to there it attends to all. Allowed is {dense} or less",
        ),
    )
    if asked is not None:
        for limit, reason in limits:
            if limit is not None and asked > limit:
                raise InvalidInputError(f"max_model_len={asked}: {reason}")
        return asked
    length = min(n for n in (most, original) if n is not None)
    if dense is not None and dense < length:
        warn_user(
            f"{type(model).__name__} takes requests of up to index_topk={dense} tokens instead of {length}: beyond, it "
            "attends to the keys that its indexer chooses, which is not served. max_model_len says so from now on"
        )
        return dense
    return int(length)


@dataclass(frozen=True)
class Pool:
    """Room for the keys and values of one cache group of the target's.

    token_bytes: of one token in its layers; in the first group with the head's, whose cache holds the same tokens.
    reach: of a windowed group; None for the first. tokens: that it has room for.
    """

    token_bytes: int
    reach: Reach | None = None
    tokens: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of all its tokens."""
        return self.tokens * self.token_bytes


Pools = tuple[Pool, ...]
"""The first group's, then one for each windowed group."""


def empty_pools(probed: TargetProbe, head: Head | None, format: KVFormat, longest: int, grouped: bool = True) -> Pools:
    """The cache groups, several where `grouped`; a reach that covers the `longest` request needs no group."""
    specs = tuple(call.attention_spec for call in probed.calls)
    dtype = format.dtype_for(probed.model.dtype)
    reaches = reaches_of(specs, longest) if grouped else ()
    groups = layers_by_group(specs, reaches)
    first, *others = (bytes_per_token(tuple(specs[layer] for layer in layers), dtype) for layers in groups)
    of_head = 0 if head is None else bytes_per_token(tuple(head.attention_specs), probed.model.dtype)
    return (Pool(first + of_head), *map(Pool, others, reaches))


def windowed_pools(pools: Pools, page_size: int) -> tuple[WindowedPool, ...]:
    """The windowed groups in pages."""
    return tuple(WindowedPool(p.reach, -(-p.tokens // page_size) + 1) for p in pools if p.reach is not None)


@dataclass(frozen=True)
class Rows:
    """Sizes that decide how many pages rows need in a windowed group; see `EngineConfig` for each."""

    num_speculative_tokens: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int

    def tokens(self, reach: Reach, rows: int) -> int:
        """Tokens of a pool in which `rows` rows decode, the next round reserved, while a chunk of prompts is read."""
        size = self.page_size
        decoding = most_owned_pages(reach, 2 * (self.num_speculative_tokens + 1), size) * size
        alone = most_owned_pages(reach, self.max_num_batched_tokens, size) * size
        tested = _TESTED_ROWS * max(size, _TESTED_TOKENS)
        return max(rows * decoding + self.max_num_batched_tokens, alone, tested)

    def fill(self, pools: Pools, tokens: int, rows: int) -> Pools:
        """A first group of `tokens`, and windowed groups of what `rows` rows need besides, which is never more."""
        needed = (tokens if p.reach is None else min(tokens, self.tokens(p.reach, rows)) for p in pools)
        return filled(pools, needed)


def filled(pools: Pools, tokens: Iterable[int]) -> Pools:
    """Pools of these tokens."""
    return tuple(replace(pool, tokens=count) for pool, count in zip(pools, tokens, strict=True))


def divide_cache(
    asked: int | None,
    device: torch.device,
    pools: Pools,
    rows: Rows,
    utilization: float,
    state_bytes: int = 0,
    scores_bytes: int = 0,
) -> Pools:
    """The pools of the KV cache: `asked` tokens in the first; else max_num_seqs rows of max_model_len, or what fits.

    What fits is 1 GiB on a CPU; on a GPU the memory left after the recurrent states of all rows (`state_bytes`) and
    the scores of requests with options (`scores_bytes`). A model without attention has no KV cache, so all tokens fit.

    Raises:
        CacheTooSmallError: the device has no room for a cache, or not for the given size.
    """
    if asked is not None:
        first, *others = found = rows.fill(pools, asked, rows.max_num_seqs)
        more = sum(pool.bytes for pool in others) + state_bytes
        check_cache_fits(device, asked, first.token_bytes, f"kv_cache_tokens={asked}", more)
        return found
    room = _CPU_CACHE_BYTES
    if device.type == "cuda":
        # Free memory less others' share, 4 GiB for activations and graphs, the recurrent states, and `scores_bytes`.
        free, total = torch.cuda.mem_get_info(device)
        room = int(free - (1 - utilization) * total) - _RESERVE_BYTES - state_bytes - scores_bytes
        if room < sum(pool.token_bytes for pool in pools):
            states = f", {_gib(state_bytes)} are the recurrent states of max_num_seqs rows (fewer take less)"
            raise CacheTooSmallError(
                f"no room for a KV cache: {_gib(free)} of {_gib(total)} are free on {device}, "
                f"gpu_memory_utilization={utilization} leaves "
                f"{_gib(max(0, room + _RESERVE_BYTES + state_bytes))} of it, and {_gib(_RESERVE_BYTES)} are reserved "
                f"for activations and graphs{states if state_bytes else ''}; raise gpu_memory_utilization or take a "
                "smaller model"
            )
    return divided(room, rows.max_num_seqs * rows.max_model_len, pools, rows)


def divided(room: int, wanted: int, pools: Pools, rows: Rows) -> Pools:
    """Divide `room` bytes, with at most `wanted` tokens in the first group.

    Windowed groups get what max_num_seqs rows need; if memory is scarce at most a quarter of it, or the share of those
    rows of max_model_len tokens that fit.
    """
    whole = rows.fill(pools, wanted, rows.max_num_seqs)
    if sum(pool.bytes for pool in whole) <= room:
        return whole
    first = pools[0].token_bytes
    near = [(pool.reach, pool.token_bytes) for pool in pools if pool.reach is not None]
    taken = [sum(size * rows.tokens(r, n) for r, size in near) for n in range(1, rows.max_num_seqs + 1)]
    long = rows.max_model_len * first
    count = sum(each <= _SHARE * room or each + n * long <= room for n, each in enumerate(taken, 1))
    count = max(count, 1)
    tokens = max((room - taken[count - 1]) // first, room // sum(pool.token_bytes for pool in pools))
    return rows.fill(pools, min(wanted, tokens), count)


def batched_tokens(device: torch.device, rows: int, num_drafts: int) -> int:
    """Most tokens of a forward by default: prompts keep the device busy, and the drafts of all rows fit."""
    large = device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= _LARGE_GPU
    return max(_MANY_TOKENS if large else _SOME_TOKENS, rows * (num_drafts + 1))


def host_bytes() -> int:
    """Memory of this machine; any size where the system does not report it (Windows)."""
    if not hasattr(os, "sysconf"):
        return sys.maxsize
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_counts(options: LoadOptions, max_model_len: int | None) -> None:
    """Check counts that no model could have together; called whenever more is known of the longest request.

    Raises:
        InvalidInputError: fewer tokens in a forward than requests in a batch, pages that are longer than requests and
            than usual, or a token table [max_num_seqs, max_model_len] that does not fit into the machine's memory.
    """
    rows = options.max_num_seqs
    page_size = options.page_size
    length = max_model_len or 1
    if options.max_num_batched_tokens is not None and options.max_num_batched_tokens < rows:
        raise InvalidInputError(
            f"max_num_batched_tokens={options.max_num_batched_tokens}: {rows} requests (max_num_seqs) with one token "
            "each need as many; lower max_num_seqs or raise it"
        )
    most = max(max_model_len or page_size, _LARGEST_USUAL_PAGE)
    if page_size > most:
        raise InvalidInputError(
            f"page_size={page_size}: a page is longer than a request can be (max_model_len={max_model_len}), and every "
            f"request holds at least one; allowed is {most} or less, usual are 1 to 64"
        )
    needed = rows * (length + 1) * _ID_BYTES
    total = host_bytes()
    if needed > total:
        raise InvalidInputError(
            f"max_num_seqs={rows}, max_model_len={length}: a table of that many token ids takes {_gib(needed)}; this "
            f"machine has {_gib(total)}; lower max_num_seqs or max_model_len"
        )


def check_sizes_fit(
    config: EngineConfig,
    device: torch.device,
    token_bytes: int,
    staging_bytes: int,
    windowed_bytes: int,
    state_bytes: int,
) -> None:
    """Check that memory can hold these sizes, before the first of them is allocated.

    token_bytes: bytes of a token in the KV caches of target and head, without windowed groups. staging_bytes: a buffer
    for the largest round. state_bytes: the recurrent states of all rows.

    Raises:
        CacheTooSmallError: the KV caches are larger than a GPU's free memory, or the machine's memory.
        InvalidInputError: the engine's tables and staging buffers, with caches on a CPU, exceed the machine's memory.
    """
    pages, page, rows, length = config.num_pages, config.page_size, config.max_num_seqs, config.max_model_len
    what = f"a KV cache of {pages} pages of page_size={page} tokens"
    cache_bytes = check_cache_fits(device, pages * page, token_bytes, what, windowed_bytes, state_bytes)
    tables = rows * (length + 1) * _ID_BYTES + rows * -(-length // page) * _ID_BYTES
    buffers = _ARENA_COPIES * staging_bytes
    total = host_bytes()
    caches = cache_bytes if device.type == "cpu" else 0
    if caches + tables + buffers > total:
        raise InvalidInputError(
            f"max_num_seqs={rows}, max_num_batched_tokens={config.max_num_batched_tokens}, max_model_len={length}, "
            f"num_speculative_tokens={config.num_speculative_tokens}: tables of tokens and pages take {_gib(tables)}, "
            f"the buffers of the largest round {_gib(buffers)}, KV caches and states {_gib(caches)}; this machine has "
            f"{_gib(total)}; lower one of them{', or kv_cache_tokens' if caches else ''}"
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


def check_cache_fits(
    device: torch.device, tokens: int, token_bytes: int, what: str, windowed_bytes: int = 0, state_bytes: int = 0
) -> int:
    """Check that a KV cache fits into a GPU's free memory, or into the machine's memory; returns its bytes.

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
        free = host_bytes()
        has = _gib(free)
    if needed > free:
        parts = f", {_gib(windowed_bytes)} of it for layers with windows or in chunks" if windowed_bytes else ""
        parts += f", {_gib(state_bytes)} of it for the recurrent states of all rows" if state_bytes else ""
        raise CacheTooSmallError(
            f"{what} takes {_gib(needed)} ({token_bytes} bytes per token{parts}); {device} has {has}: room for "
            f"{max(free - beside, 0) // max(token_bytes, 1)} tokens; lower kv_cache_tokens or page_size"
            + (", or max_num_seqs" if state_bytes else "")
        )
    return needed


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
