"""Loading on rank 0: checks the division, starts the other ranks, loads all shares, names the rank of an error."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import AutoConfig
from transformers import __version__ as transformers_version
from transformers.utils import is_accelerate_available

from attention.errors import named_error
from attention.threads import start_thread
from specdec.errors import InvalidInputError, ModelLoadError, RanksLostError, SpecdecError, UnsupportedModelError
from specdec.extensions.parallel import messages
from specdec.extensions.parallel.collectives import Collectives
from specdec.extensions.parallel.engine import LeadingEngine
from specdec.extensions.parallel.plan import plan_for
from specdec.extensions.parallel.ranks import Ranks
from specdec.extensions.parallel.symmetric import join_group
from specdec.extensions.parallel.workers import Workers, WorkersChannel, are_open, is_fork, open_workers, starting
from specdec.loading.adapters import with_adapter
from specdec.loading.checkpoint import Checkpoint, check_target_folder, find_checkpoint
from specdec.loading.heads import read_draft_vocab
from specdec.loading.load_errors import loading_named
from specdec.loading.names import ModelName, pair_of
from specdec.loading.progress import log
from specdec.loading.quantisation import check_quantisation, stored_quantisation
from specdec.loading.targets import auto_class
from specdec.loading.tokenizers import open_tokenizer
from specdec.options import LoadOptions
from specdec.requests.prompts import encode_prompts
from specdec.selftest.selftest import SELF_TEST_TEXT
from specdec.values import short

T = TypeVar("T")
_LOOK = 0.1
"""Seconds between two polls of the ranks while they meet."""
Load = Callable[[Any, Any, LoadOptions, Ranks], T]
"""(target, draft, options with a tokenizer, ranks) -> the model."""


def load_divided(load: Load[T], target: Any, draft: Any, options: LoadOptions) -> T:
    """Start the other ranks, unless they are, and call `load` here while they do the same.

    Raises:
        InvalidInputError, ModelLoadError: it cannot be divided, see `check_parallel`; or a rank fails, which is named.
    """
    device = check_parallel(target, draft, options)
    pair = pair_of(target, draft, options.revision)
    target = pair.target
    draft = pair.draft
    checkpoint = find_checkpoint(target, options.revision, options.trust_remote_code)
    with pair.explained():
        check_shares(checkpoint, options.tensor_parallel_size)
    tokenizer = open_tokenizer(options.tokenizer, checkpoint)
    text_ids = [] if draft is None else _text_ids(tokenizer)
    options = replace(options, draft_vocab=read_draft_vocab(options.draft_vocab))
    message = messages.Load(
        _everywhere(target), None if draft is None else _everywhere(draft), replace(options, tokenizer=None), text_ids
    )
    link = start_ranks(options.tensor_parallel_size, device)
    workers = link.workers
    assert workers.collectives is not None
    ranks = Ranks(0, options.tensor_parallel_size, device, workers.collectives, link, LeadingEngine, _moving)
    try:
        with workers.lock, workers.loading(), ranks.together():
            link.send(message)
            model = load(target, draft, replace(options, tokenizer=tokenizer, device=device), ranks)
            workers.wait_answers(("loaded", link.number, 0))
    except BaseException as error:
        found = _settled(workers, error)
        link.close()
        if found is None:
            raise
        raise found from error
    return model


def _moving() -> tuple[Any, Any]:
    from specdec.extensions.parallel.among_ranks import LeadingRequests, RanksLink

    return LeadingRequests, RanksLink


def check_shares(checkpoint: Checkpoint, size: int) -> None:
    """Check by a target's configuration alone that `size` ranks can divide it, before any process is started.

    Raises:
        InvalidInputError: it is an adapter, or its heads cannot be divided among so many.
        UnsupportedModelError: it is quantised, or has no plan.
        ModelLoadError: its configuration is missing or damaged.
    """
    checkpoint = with_adapter(checkpoint, None, "auto")
    if checkpoint.adapter is not None:
        raise InvalidInputError(_no_adapter(size, f"the target is the adapter {checkpoint.adapter}, which"))
    with loading_named(checkpoint, "the target model"):
        check_target_folder(checkpoint)
        config = AutoConfig.from_pretrained(checkpoint.path, **checkpoint.options)
        method = check_quantisation(stored_quantisation(config))
        check_not_quantised("quanto" if checkpoint.is_quanto else method, size)
        plan_for(config, auto_class(config), size)


def _text_ids(tokenizer: Any) -> list[int]:
    """Token ids of the head's self-test; [] if the tokenizer cannot encode its text: a head that needs them raises."""
    with suppress(InvalidInputError):
        return encode_prompts(SELF_TEST_TEXT, tokenizer)[0]
    return []


def _everywhere(name: ModelName) -> str:
    """The name, valid in a process that was started in another folder."""
    return os.path.abspath(name) if os.path.isdir(name) else str(name)


def start_ranks(size: int, device: torch.device) -> WorkersChannel:
    """A link to the other ranks, which are started unless they run.

    Raises:
        InvalidInputError: models of another number of ranks are open. ModelLoadError: a rank does not start.
    """
    with starting:
        workers, new = open_workers(size)
        link = workers.new_link()
        if new:
            log.info("starting %d more ranks", size - 1)
            # Form a group with the other ranks once they run. An error ends them.
            try:
                workers.wait_answers(messages.STARTED)
                meeting = f"{workers.folder}/meeting"
                workers.send((0, messages.Join(workers.size, device.type, meeting)))
                workers.collectives = _joined(workers, workers.size, device, meeting)
            except BaseException as error:
                found = workers.found_loss() if isinstance(error, Exception) else None
                link.close()
                if isinstance(error, RanksLostError) or found is not None:
                    raise ModelLoadError(f"a rank did not start: {found or error}") from error
                raise
        return link


def _joined(workers: Workers, size: int, device: torch.device, meeting: str) -> Collectives:
    """Join the group on a separate thread: gloo and NCCL wait long or without end for a rank that is lost meanwhile.

    Raises:
        RanksLostError: a rank is lost.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread
    joined: Future[Collectives] = Future()

    def join() -> None:
        try:
            joined.set_result(join_group(0, size, device, meeting))
        except BaseException as error:  # raised below, on the caller's thread
            joined.set_exception(error)

    start_thread(join, name="join")
    while not wait([joined], _LOOK).done:
        workers.check()
    return joined.result()


def _settled(workers: Workers, error: BaseException) -> SpecdecError | None:
    """The other rank's error that `error` came from; None where it is this rank's own.

    Where all ranks raise the same they stay in step. Otherwise they are at different places, and other open models are
    lost, too.
    """
    if isinstance(error, SpecdecError) and workers.same_failures(type(error).__name__):
        return None
    own = isinstance(error, SpecdecError) and not isinstance(error, (ModelLoadError, RanksLostError))
    found = workers.found_failure() if isinstance(error, Exception) and not own else None
    workers.give_up(f"loading a model failed ({found or named_error(error)})")
    return None if found is None else ModelLoadError(f"cannot load on all ranks: {found}")


_OLDEST = (5, 23)
"""The first release of transformers that plans and reads shares as `plan.told` and `plan.as_rank` need."""


def check_parallel(target: Any, draft: Any, options: LoadOptions) -> torch.device:
    """Check before any process is started that such a model can be divided at all; returns the device of rank 0.

    Raises:
        InvalidInputError: objects in place of names, an option that is not served, too few GPUs, or a process group
            made by the user.
        ModelLoadError: transformers is too old, or accelerate is missing.
    """
    size = options.tensor_parallel_size
    given = f"tensor_parallel_size={size}"
    for what, value in (("target", target), ("draft", draft)):
        if value is not None and not isinstance(value, (str, Path)):
            raise InvalidInputError(
                f"{given}: {what}={short(value)} is an object of this process, and every rank loads its own share; "
                "give its folder or hub name"
            )
    if not hasattr(os, "fork"):
        raise InvalidInputError(f"{given}: served on Linux and other systems with processes of their kind, not here")
    _check_packages(given)
    if options.adapter is not None:
        raise InvalidInputError(_no_adapter(size, f"adapter={short(options.adapter)}"))
    if options.backend == "batch_invariant" and size > 2:
        raise InvalidInputError(
            f"{given}, backend='batch_invariant': sums of more than two ranks may round by their order, which depends "
            "on the size of a batch; give tensor_parallel_size=2, or another backend"
        )
    if is_fork():
        raise InvalidInputError(
            f"{given}: this process is a fork of one with tensor-parallel models, whose ranks and process group it has "
            "not; fork before they are loaded, or start it as a program of its own (multiprocessing: 'spawn')"
        )
    if not are_open() and dist.is_available() and dist.is_initialized():
        raise InvalidInputError(
            f"{given}: this process has a torch.distributed process group of its own; load the model in a process "
            "without one (destroy_process_group() ends it)"
        )
    return _first_device(options.device, size)


def _check_packages(given: str) -> None:
    version = tuple(map(int, transformers_version.split(".")[:2]))
    if version < _OLDEST:
        raise ModelLoadError(
            f"{given} needs transformers >= {'.'.join(map(str, _OLDEST))}, which plans and reads shares; this is "
            f"{transformers_version}: pip install 'specdec-hf[parallel]'"
        )
    if not is_accelerate_available():
        raise ModelLoadError(f"{given} needs the package accelerate: pip install 'specdec-hf[parallel]'")


def _first_device(device: Any, size: int) -> torch.device:
    """cpu, or cuda:0. Raises InvalidInputError for any other, and for fewer GPUs than ranks."""
    given = f"tensor_parallel_size={size}"
    has_cuda = torch.cuda.is_available()
    kind = str(device or ("cuda" if has_cuda else "cpu"))
    if kind not in ("cpu", "cuda"):
        raise InvalidInputError(
            f"{given}, device={short(device)}: rank r runs on cuda:r; leave device out, and choose GPUs by "
            "CUDA_VISIBLE_DEVICES"
        )
    if kind == "cpu":
        if has_cuda:
            raise InvalidInputError(
                f"{given}, device='cpu': transformers puts shares on this machine's GPUs; hide them with "
                "CUDA_VISIBLE_DEVICES=''"
            )
        return torch.device("cpu")
    count = torch.cuda.device_count() if has_cuda else 0
    if count < size:
        raise InvalidInputError(f"{given}: one GPU for each rank is needed, and torch sees {count}")
    return torch.device("cuda", 0)


def _no_adapter(size: int, what: str) -> str:
    return (
        f"tensor_parallel_size={size}: {what} cannot be applied to shares of weights; merge it and save the merged "
        "model (peft's merge_and_unload), and give its folder"
    )


def check_not_quantised(method: str | None, size: int) -> None:
    """Check that weights are not quantised by a `method`, because shares of quantised weights are not served.

    Raises:
        UnsupportedModelError: they are.
    """
    if method is not None:
        raise UnsupportedModelError(
            f"tensor_parallel_size={size}: the checkpoint's weights are quantised ({method}), and shares of "
            "those are not served; give a checkpoint in bfloat16, float16 or float32"
        )
