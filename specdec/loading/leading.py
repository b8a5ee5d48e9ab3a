"""Rank 0 of a load: the other ranks' processes are started, all load their shares, and an error names its rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from specdec.errors import ModelLoadError, RanksLostError, SpecdecError
from specdec.loading.checkpoint import find_checkpoint
from specdec.loading.groups import Division
from specdec.loading.parallel import check_parallel
from specdec.loading.progress import log
from specdec.loading.tokenizers import open_tokenizer
from specdec.options import LoadOptions
from specdec.parallel.group import join_group, leave_group
from specdec.parallel.messages import Load
from specdec.parallel.ranks import Ranks
from specdec.parallel.workers import Workers
from specdec.requests.prompts import encode_prompts
from specdec.target.selftest import SELF_TEST_TEXT

T = TypeVar("T")


def load_on_all_ranks(load: Callable[[Any, Ranks], T], target: Any, draft: Any, options: LoadOptions) -> T:
    """Start the other ranks, and call load(tokenizer, ranks) here while they do the same.

    Raises:
        InvalidInputError, ModelLoadError: it cannot be divided, see `check_parallel`; or a rank fails, which is named.
        RanksLostError: a rank cannot even start.
    """
    device = check_parallel(target, draft, options)
    checkpoint = find_checkpoint(target, options.revision, options.trust_remote_code)
    tokenizer = open_tokenizer(options.tokenizer, checkpoint)
    (text_ids,) = ([],) if draft is None else encode_prompts(SELF_TEST_TEXT, tokenizer)
    log.info("starting %d more ranks", options.tensor_parallel_size - 1)
    workers = Workers(options.tensor_parallel_size)
    try:
        workers.wait_started()
        return _load_beside(workers, load, tokenizer, device, _message(workers, target, draft, options, text_ids))
    except BaseException as error:
        found = _blamed(workers, error)
        workers.close()
        leave_group()
        if found is None:
            raise
        raise found from error


def _load_beside(
    workers: Workers, load: Callable[[Any, Ranks], T], tokenizer: Any, device: Any, message: Load
) -> T:
    for rank in range(1, message.size):
        workers.send_to(rank, replace(message, rank=rank))
    ranks = join_group(0, message.size, device, message.rendezvous, workers)
    workers.on_loss(ranks.collectives.abort)
    with ranks.together():
        model = load(tokenizer, ranks)
    workers.wait_loaded()
    return model


def _message(workers: Workers, target: Any, draft: Any, options: LoadOptions, text_ids: list[int]) -> Load:
    """For every rank but its number. A tokenizer stays here: only rank 0 has texts."""
    named = None if draft is None else str(draft) if isinstance(draft, (str, Path)) else draft
    meeting = f"{workers.folder}/meeting"
    return Load(0, options.tensor_parallel_size, meeting, str(target), named, replace(options, tokenizer=None), text_ids)


def _blamed(workers: Workers, error: BaseException) -> SpecdecError | None:
    """The error of another rank that `error` here came from; None where it is this rank's own.

    What all ranks refuse alike is raised here as it is.
    """
    if not isinstance(error, Exception) or isinstance(error, RanksLostError):
        return ModelLoadError(str(error)) if isinstance(error, RanksLostError) else None
    if isinstance(error, SpecdecError) and not isinstance(error, ModelLoadError):
        return None
    found = workers.found_loss()
    if found is None or f": {type(error).__name__}: " in found:
        return None
    return ModelLoadError(f"cannot load on all ranks: {found}")


def least_of_all(cache: Division, ranks: Ranks) -> Division:
    """The tokens that all ranks have room for: their schedules must be the same."""
    tokens, *windowed = ranks.collectives.least([cache.tokens, *cache.windowed])
    return Division(tokens, tuple(windowed))
