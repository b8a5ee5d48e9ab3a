"""A model's end of a transport: each rank's regions and reads, and the checks of other engines."""

from __future__ import annotations

import inspect
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attention.transport.nixl_agent import NixlTransport
from attention.transport.region_tables import Bounds, EngineTable, RankTable, bind, check_fingerprints, plan
from attention.transport.sockets import SocketTransport
from attention.transport.transports import LocalTransport, Read, ReadPlan, Transport, synchronize
from specdec.errors import HandoffMismatchError, InvalidInputError, TransferError
from specdec.extensions.handoff.held import HeldPages
from specdec.extensions.handoff.moved import Departed, Handoff, Pages, Tensors
from specdec.extensions.handoff.moving import MovingRequests
from specdec.requests.request import Update
from specdec.values import Json, Options, without, wrong
from specdec.wrapped.changes import WeightVersions, adapter_layers, adapter_states, in_words
from specdec.wrapped.fingerprint import shared_fingerprint, tokens_fingerprint, weights_fingerprint

TRANSPORTS: dict[str, Callable[..., Transport]] = {
    "local": LocalTransport,
    "sockets": SocketTransport,
    "nixl": NixlTransport,
}
_SHARES = "target weights, share by share"
_METHODS = ("start", "grant", "revoke", "read", "finish", "finished", "close")


def made(transport: str | Transport, options: Options) -> Transport:
    """A transport that is not open yet: made from its name and options, or the given object.

    Raises:
        InvalidInputError: no transport, options that it does not have, or values that these cannot have.
    """
    if isinstance(transport, str):
        known = inspect.signature(TRANSPORTS[transport]).parameters
        if unknown := [name for name in options if name not in known]:
            allowed = ", ".join(known) or "none"
            raise InvalidInputError(
                f"{', '.join(unknown)}: no option of transport {transport!r}; allowed are: {allowed}"
            )
        return TRANSPORTS[transport](**options)
    if isinstance(transport, type) or not all(callable(getattr(transport, name, None)) for name in _METHODS):
        raise wrong(
            "transport",
            transport,
            f"allowed are {', '.join(TRANSPORTS)}, and objects with the methods of "
            "`attention.transport.transports.Transport`",
        )
    if options:
        raise InvalidInputError(f"{', '.join(options)}: options belong to a transport's name; give them to the object")
    return transport


class RankEnd:
    """A model's end of a transport on one rank.

    Attributes:
        transport: open. table: what other engines need to know about this rank.
        groups: the cache groups, in the order of an engine's pools.
    """

    def __init__(self, model: Any, held: HeldPages, transport: Transport, engine: str) -> None:
        """Make the pages of a `SpeculativeModel` readable, by the `engine` name that only its ranks share.

        Raises:
            InvalidInputError: the layers' heads are not divided alike. TransferError: it cannot be opened.
        """
        ranks = model.ranks
        number = 0 if ranks is None else ranks.rank
        device = str(model.device)
        part = 0 if ranks is None else _part(ranks)
        bounds: Bounds = ()
        for runner in model.runners:
            is_head = model.head is not None and runner is model.runners[-1]  # the head is not divided among ranks
            bounds += bind(runner.group, runner.layers, own_part=0 if is_head else part)
        address = transport.start(engine if number == 0 else f"{engine}-rank-{number}", bounds, device)
        self.transport = transport
        self._bounds = bounds
        self.groups = [runner.group.name for runner in model.runners]
        self.table = RankTable(number, device, tuple(bound.region for bound in bounds), dict(address))
        held.finished = transport.finished
        held.revoke = transport.revoke
        held.grant = lambda lease, pages: transport.grant(lease, dict(zip(self.groups, pages, strict=True)))

    def read_plan(self, handoff: Handoff, pages: Pages) -> ReadPlan:
        """What this rank reads into reserved pages.

        Raises:
            HandoffMismatchError: it cannot move here, see `plan`; or it has a different number of pages there.
        """
        here = dict(zip(self.groups, pages, strict=True))
        for group, own in here.items():
            if len(own) != len(handoff.blocks[group]):
                raise HandoffMismatchError(
                    f"cache group {group}: {len(handoff.blocks[group])} pages there and {len(own)} here for a "
                    "request of the same length"
                )
        segments = plan(self.table, handoff.source.ranks)
        return ReadPlan(handoff.source, handoff.lease, self.table, segments, handoff.blocks, here)

    def read(self, own: ReadPlan) -> Read:
        """Start a read. Raises TransferError: the source cannot be reached."""
        synchronize(self._bounds)  # launched rounds may still write to freed pages
        return _InTime(self.transport.read(own))


@dataclass(frozen=True)
class _InTime:
    """A `Read` that fails unless it is done before its deadline, after which the source may reuse its pages."""

    read: Read

    def wait(self, deadline: float) -> None:
        """See `Read.wait`. Raises TransferError: the deadline passed meanwhile."""
        self.read.wait(deadline)
        if time.monotonic() > deadline:
            raise TransferError("the lease of the request ended while its pages were read")

    @property
    def settled(self) -> bool:
        return self.read.settled


def _part(ranks: Any) -> int:
    """Which part of a layer's KV heads this rank holds. Raises InvalidInputError: layers are divided differently."""
    kinds = ranks.part.kv_copies if ranks.part is not None else frozenset({ranks.size})
    if len(kinds) > 1:
        raise InvalidInputError(
            f"of this model's layers some have their key-value heads divided among {ranks.size} ranks otherwise than "
            "others; its requests cannot move: load it with tensor_parallel_size=1"
        )
    return ranks.rank // next(iter(kinds), ranks.size)


def options_of_rank(options: Options, rank: int) -> Options:
    """A transport's options on a rank: rank r listens on the r-th port after the given one."""
    port = options.get("port")
    return {**options, "port": port + rank} if isinstance(port, int) and port else options


class Link:
    """An open transport of a model: each rank's regions, and what must be equal in the other engine."""

    def __init__(
        self, model: Any, guests: MovingRequests, own: Transport, transport: str | Transport, options: Options
    ) -> None:
        """Open it on all ranks, between two rounds. own: this rank's, see `made`.

        transport: a name, by which other ranks make theirs with these `options`; an object is for models of one rank.

        Raises:
            InvalidInputError, TransferError: see `Transfers.open`.
        """
        self._model = model
        self._guests = guests
        self._engine_name = f"specdec-{uuid.uuid4().hex}"
        self._end = RankEnd(model, guests.held, own, self._engine_name)
        self._versions = WeightVersions(model.hf_model, model.head)
        self._weights: Json | None = None
        self._stale = False
        self._looking = threading.Lock()
        self._ranks = (self._end.table, *self._others(transport, options))

    def _others(self, transport: str | Transport, options: Options) -> tuple[RankTable, ...]:
        """Open it on the other ranks; their tables."""
        return ()

    def close(self) -> None:
        """Stop serving and reading on this rank; other ranks stop with their model. Idempotent."""
        self._end.transport.close()

    def table(self) -> EngineTable:
        """What other engines need to know about this one; weights are hashed once, and again when they change.

        Raises:
            HandoffMismatchError: weights of a model that is divided among ranks have changed here.
        """
        with self._looking:
            self._stale = self._versions.changed() or self._stale
            if self._stale and self._model.ranks is not None:
                raise HandoffMismatchError(
                    "weights, modules or hooks of this rank have changed, and those of the others are not known; load "
                    "the model again"
                )
            if self._weights is None or self._stale:
                self._weights = fingerprint(self._model, *shared_fingerprint(self._model.hf_model))
                self._stale = False
            return EngineTable(self._engine_name, self._end.transport.name, self._weights, self._ranks)

    def handed_over(self, update: Update, lease_seconds: float) -> Handoff:
        """The handoff that `prefill` returns for a request that has left, or ended with its first token.

        Raises:
            RequestFailedError, RoundFailedError: the request failed.
        """
        if update.error is not None:
            raise update.error
        if not isinstance(update, Departed):
            return Handoff(self.table(), "", 0.0, None, {}, {}, update.completion)
        blocks = dict(zip(self._end.groups, update.pages, strict=True))
        expires = time.time() + lease_seconds
        return Handoff(self.table(), update.lease, expires, update.moved, blocks, update.tensors)

    def check(self, handoff: Handoff) -> None:
        """Check that a request can move here, on every rank.

        Raises:
            HandoffMismatchError: it cannot. InvalidInputError, CacheTooSmallError: see `MovingRequests.check_moved`.
        """
        source = handoff.source
        groups = self._end.groups
        if source.transport != self._end.transport.name:
            raise HandoffMismatchError(
                f"the request was handed over by transport {source.transport!r}, and this model has "
                f"{self._end.transport.name!r}: call open_transfer({source.transport!r})"
            )
        here, there = self.table().fingerprint, source.fingerprint
        counts = {len(shares) for each in (here, there) if isinstance(shares := each.get(_SHARES), list)}
        if len(counts) == 2:  # engines of different numbers of ranks cannot compare them
            here, there = without(here, (_SHARES,)), without(there, (_SHARES,))
        check_fingerprints(here, there)
        if set(handoff.blocks) != set(groups):
            raise HandoffMismatchError(
                f"cache groups {sorted(handoff.blocks)} there and {sorted(groups)} here; load both models with "
                "the same hybrid_kv_cache and max_model_len"
            )
        assert handoff.moved is not None
        self._guests.check_moved(handoff.moved)
        refused = self._guests.tensors.refuses(handoff.tensors) or self._wrong_drafts(handoff.tensors)
        if refused:
            raise HandoffMismatchError(refused)
        for rank in self._ranks:
            plan(rank, source.ranks)

    def _wrong_drafts(self, tensors: Tensors) -> str:
        """Why drafts cannot be verified here, "" if they can: an id outside of the vocabulary would end a round."""
        drafts = tensors.get("drafts")
        most = self._model.num_speculative_tokens
        if drafts is None:
            return ""
        vocab = self._model.target.num_embeddings
        count = len(drafts) if drafts.dim() == 1 else -1
        if drafts.dtype != torch.int64 or not 0 < count <= most or not 0 <= drafts.min() <= drafts.max() < vocab:
            return f"it brings drafts {drafts.tolist()}; allowed are 1 to {most} ids from 0 to {vocab - 1}"
        width = self._model.head.draft_vocab_size
        shapes = {"draft_probs": (count, width), "draft_logits": (count, width), "draft_stats": (count, 4)}
        wrong = [name for name, shape in shapes.items() if name in tensors and tuple(tensors[name].shape) != shape]
        return f"it brings {wrong[0]} of shape {tuple(tensors[wrong[0]].shape)}" if wrong else ""

    def fetch(self, handoff: Handoff, number: int, timeout: float) -> None:
        """Fill the reserved pages on every rank. After an error they are free, or in quarantine while anything may
        still write to them.

        `finish` is called once all ranks have read: the source then frees its pages, on all of its ranks.

        Raises:
            TransferError, TransferTimeoutError: see `Transfers.resume`.
        """
        read: Read | None = None
        try:
            left = min(timeout, handoff.expires - time.time())
            if left <= 0:
                raise TransferError(f"the lease of the request is over since {-left:.1f} s: its pages are not held")
            deadline = time.monotonic() + left
            own = self._end.read_plan(handoff, self._guests.held.pages_of(number))
            read = self._begun(own, handoff, number, deadline)
            read.wait(deadline)
        except BaseException:
            with self._model._shared.between_rounds():
                self._guests.drop(number, lambda: read is None or read.settled)
            raise
        self._end.transport.finish(own)

    def _begun(self, own: ReadPlan, handoff: Handoff, number: int, deadline: float) -> Read:
        """Start a read on all ranks. own: this rank's plan. Raises TransferError: the source cannot be reached."""
        return self._end.read(own)


@torch.no_grad()
def fingerprint(model: Any, weights: str, shares: list[str]) -> Json:
    """By name, all that must be equal for a request to continue in another engine with the same tokens and drafts.

    weights, shares: the target's, see `shared_fingerprint`.
    """
    head = model.head
    states = model.target.states
    modules = min(getattr(head, "num_modules", 1), max(model.num_speculative_tokens, 1))
    adapters = in_words(adapter_states(adapter_layers(model.hf_model)))
    formats = {r.group.name: r.group.format for r in model.runners}
    scales = {name: [list(pair) for pair in own.scales] for name, own in formats.items() if own.scales}
    found: Json = {
        "head": None if head is None else type(head).__name__,
        "target weights": weights + (f", adapters {adapters}" if adapters else ""),
        _SHARES: shares,
        "scales of an fp8 cache": scales,
        "recurrent states": None if states is None else [list(shape) for shape in states.moved_shapes],
        "sampling": model.config.sampling,
        "draft_sampling": None if head is None else model.config.draft_sampling,
        "modules of the head": None if head is None else modules,
        "drafts without a head": [str(extra) for extra in model.config.extras if extra.drafts] or None,
    }
    if head is not None:
        form = (repr(getattr(head, "spec", "")), head.attention_specs, head.aux_layers)
        own = weights_fingerprint(head) if isinstance(head, torch.nn.Module) else ""
        found["head weights"] = f"{own} {form}"
        tokens = tokens_fingerprint(head, model.device)
        found["draft_vocab"] = f"{head.draft_vocab_size} tokens, fingerprint {tokens}"
    return found
