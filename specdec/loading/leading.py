"""Rank 0 of a load: the other ranks' processes are started, all load their shares, and an error names its rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from specdec.errors import InvalidInputError, ModelLoadError, RanksLostError, SpecdecError
from specdec.loading.checkpoint import find_checkpoint
from specdec.loading.pairs import pair_of
from specdec.loading.parallel import check_parallel
from specdec.loading.progress import log
from specdec.loading.targets import check_shares
from specdec.loading.tokenizers import open_tokenizer
from specdec.options import LoadOptions
from specdec.parallel import messages
from specdec.parallel.collectives import Collectives
from specdec.parallel.group import join_group
from specdec.parallel.leaving import HelperThread
from specdec.parallel.ranks import Ranks
from specdec.parallel.workers import Link, Workers, open_workers, starting
from specdec.requests.prompts import encode_prompts
from specdec.selftest.selftest import SELF_TEST_TEXT

T = TypeVar("T")
_LOOK = 0.1
"""Seconds between two looks at the ranks while they meet."""
Load = Callable[[Any, Any, LoadOptions, Ranks], T]
"""(target, draft, options with a tokenizer, ranks) -> the model."""


def load_on_all_ranks(load: Load[T], target: Any, draft: Any, options: LoadOptions) -> T:
    """Start the other ranks, unless they are, and call `load` here while they do the same.

    Raises:
        InvalidInputError, ModelLoadError: it cannot be divided, see `check_parallel`; or a rank fails, which is named.
    """
    device = check_parallel(target, draft, options)
    pair = pair_of(target, draft, options.revision)
    target, draft = pair.target, pair.draft
    checkpoint = find_checkpoint(target, options.revision, options.trust_remote_code)
    with pair.explained():
        check_shares(checkpoint, options.tensor_parallel_size)
    tokenizer = open_tokenizer(options.tokenizer, checkpoint)
    text_ids = [] if draft is None else _text_ids(tokenizer)
    message = messages.Load(
        _everywhere(target), None if draft is None else _everywhere(draft), replace(options, tokenizer=None), text_ids
    )
    link = start_ranks(options.tensor_parallel_size, device)
    ranks = Ranks(0, options.tensor_parallel_size, device, link.workers.collectives, link)
    try:
        with link.workers.lock, link.workers.loading(), ranks.together():
            link.send(message)
            model = load(target, draft, replace(options, tokenizer=tokenizer), ranks)
            link.workers.wait_loaded(link.number)
    except BaseException as error:
        found = _settled(link.workers, error)
        link.close()
        if found is None:
            raise
        raise found from error
    return model


def _text_ids(tokenizer: Any) -> list[int]:
    """Of the head's self-test; none where this tokenizer cannot encode it, which a head that needs them says itself."""
    with suppress(InvalidInputError):
        return encode_prompts(SELF_TEST_TEXT, tokenizer)[0]
    return []


def _everywhere(name: str | Path) -> str:
    """A name that means the same in a process that was started in another folder."""
    return os.path.abspath(name) if os.path.isdir(name) else str(name)


def start_ranks(size: int, device: torch.device) -> Link:
    """A link to the other ranks, which are started unless they are.

    Raises:
        InvalidInputError: models of another number of ranks are open.
        ModelLoadError: a rank does not start.
    """
    with starting:
        workers, new = open_workers(size)
        link = workers.new_link()
        if new:
            log.info("starting %d more ranks", size - 1)
            _meet(workers, link, device)
        return link


def _meet(workers: Workers, link: Link, device: torch.device) -> None:
    """Wait until the other ranks run, and form a group with them. What raises ends them."""
    size = workers.size
    try:
        workers.wait_started()
        meeting = f"{workers.folder}/meeting"
        for rank in range(1, size):
            workers.send((0, messages.Join(rank, size, device.type, meeting)), rank)
        workers.met(_joined(workers, size, device, meeting))
    except BaseException as error:
        found = workers.found_loss() if isinstance(error, Exception) else None
        link.close()
        if isinstance(error, RanksLostError) or found is not None:
            raise ModelLoadError(f"a rank did not start: {found or error}") from error
        raise


def _joined(workers: Workers, size: int, device: torch.device, meeting: str) -> Collectives:
    """Join the group on a thread of its own: gloo and NCCL wait long or without end for a rank that is lost meanwhile.

    Raises:
        RanksLostError: one is.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    found: list[Collectives | BaseException] = []

    def join() -> None:
        try:
            found.append(join_group(0, size, device, meeting))
        except BaseException as error:
            found.append(error)

    joined = HelperThread("join").start(join)
    while not joined.wait(_LOOK):
        workers.check()
    (result,) = found
    if isinstance(result, BaseException):
        raise result
    return result


def _settled(workers: Workers, error: BaseException) -> SpecdecError | None:
    """The error of another rank that `error` here came from, or None where it is this rank's own.

    What all ranks refuse alike leaves them where they were. Otherwise they stand at different places: other models that
    are open are lost, too.
    """
    if isinstance(error, SpecdecError) and workers.same_failures(type(error).__name__):
        return None
    own = isinstance(error, SpecdecError) and not isinstance(error, (ModelLoadError, RanksLostError))
    found = workers.found_failure() if isinstance(error, Exception) and not own else None
    workers.give_up(f"loading a model failed ({found or f'{type(error).__name__}: {error}'})")
    return None if found is None else ModelLoadError(f"cannot load on all ranks: {found}")
