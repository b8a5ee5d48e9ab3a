"""A model's end of a transport, of all its ranks: what it tells other engines, and what it checks of theirs."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

import torch

from attention.cache.handoff import EngineTable, RankTable, check_fingerprints, plan
from attention.transport.transports import Read, Transport
from specdec.engine.ranked import LeadingEngine
from specdec.errors import HandoffMismatchError, TransferError
from specdec.requests.handoff import Handoff
from specdec.requests.request import Update
from specdec.transfer.end import RankEnd
from specdec.transfer.ranks import RanksRead, open_on_other_ranks
from specdec.wrapped.fingerprint import fingerprints_of_ranks, weights_fingerprint
from specdec.wrapped.model_check import adapter_layers, adapter_states, in_words
from specdec.wrapped.versions import WeightVersions

_SHARES = "target weights, share by share"


class Link:
    """An open transport of a model: each rank's regions, and what must be equal at the other end."""

    def __init__(self, model: Any, own: Transport, transport: str | Transport, options: Mapping[str, Any]) -> None:
        """Open it, on all ranks. Between two rounds.

        Args:
            model: a `SpeculativeModel`. own: this rank's, see `made`. transport: a name, by which other ranks make
                theirs with these `options`; any other belongs to a model of one rank.

        Raises:
            InvalidInputError, TransferError: see `Moving.open_transfer`.
        """
        self._model = model
        self._engine_name = f"specdec-{uuid.uuid4().hex}"
        self._end = RankEnd(model, own, self._engine_name)
        self._versions = WeightVersions(model.hf_model, model.head)
        self._weights: dict[str, Any] | None = None
        self._stale = False
        self._looking = threading.Lock()
        others: tuple[RankTable, ...] = ()
        if isinstance(model.engine, LeadingEngine) and isinstance(transport, str):
            try:
                others = open_on_other_ranks(model, transport, dict(options), self._engine_name)
            except BaseException:
                self._end.close()
                raise
            found = model.engine.run("specdec.wrapped.fingerprint:of_all_ranks")
            self._weights = fingerprint(model, *found)
        self._ranks = (self._end.table, *others)

    def close(self) -> None:
        """Stop serving and reading on this rank; other ranks do with their model. Idempotent."""
        self._end.close()

    def table(self) -> EngineTable:
        """What others need to know of this engine; its weights are looked at once, and again when they change.

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
                self._weights = fingerprint(self._model, *fingerprints_of_ranks(self._model.hf_model, None))
                self._stale = False
            return EngineTable(self._engine_name, self._end.transport.name, self._weights, self._ranks)

    def handed_over(self, update: Update, lease_seconds: float) -> Handoff:
        """What `prefill` returns of a request that has left, or ended with its first token.

        Raises:
            RequestFailedError, RoundFailedError: the request failed.
        """
        if update.error is not None:
            raise update.error
        departure = update.departure
        if departure is None:
            return Handoff(self.table(), "", 0.0, None, {}, {}, update.completion)
        blocks = dict(zip(self._end.groups, departure.pages, strict=True))
        expires = time.time() + lease_seconds
        return Handoff(self.table(), departure.lease, expires, departure.moved, blocks, departure.tensors)

    def check(self, handoff: Handoff) -> None:
        """Whether a request can move here, on every rank.

        Raises:
            HandoffMismatchError: it cannot. InvalidInputError, CacheTooSmallError: see `Engine.check_moved`.
        """
        source, groups = handoff.source, self._end.groups
        if source.transport != self._end.transport.name:
            raise HandoffMismatchError(
                f"the request was handed over by transport {source.transport!r}, and this model has "
                f"{self._end.transport.name!r}: call open_transfer({source.transport!r})"
            )
        check_fingerprints(*comparable(self.table().fingerprint, source.fingerprint))
        if set(handoff.blocks) != set(groups):
            raise HandoffMismatchError(
                f"cache groups {sorted(handoff.blocks)} there and {sorted(groups)} here; load both models with "
                "the same hybrid_kv_cache and max_model_len"
            )
        self._model.engine.check_moved(handoff.moved)
        refused = self._model.executor.moves.refuses(handoff.tensors) or self._wrong_drafts(handoff.tensors)
        if refused:
            raise HandoffMismatchError(refused)
        for rank in self._ranks:
            plan(rank, source.ranks)

    def _wrong_drafts(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """Why drafts cannot be verified here, "" when they can: an id outside of the vocabulary would end a round."""
        drafts, most = tensors.get("drafts"), self._model.num_speculative_tokens
        if drafts is None:
            return ""
        vocab, count = self._model.target.num_embeddings, len(drafts) if drafts.dim() == 1 else -1
        if drafts.dtype != torch.int64 or not 0 < count <= most or not 0 <= drafts.min() <= drafts.max() < vocab:
            return f"it brings drafts {drafts.tolist()}; allowed are 1 to {most} ids from 0 to {vocab - 1}"
        width = self._model.head.draft_vocab_size
        shapes = {"draft_probs": (count, width), "draft_logits": (count, width), "draft_stats": (count, 4)}
        wrong = [name for name, shape in shapes.items() if name in tensors and tuple(tensors[name].shape) != shape]
        return f"it brings {wrong[0]} of shape {tuple(tensors[wrong[0]].shape)}" if wrong else ""

    def fetch(self, handoff: Handoff, number: int, timeout: float) -> None:
        """Fill the reserved pages of every rank. After an error they are free, or in quarantine while anything may
        write to them.

        The source is told once all ranks have read: its pages are free then, on all of its ranks.

        Raises:
            TransferError, TransferTimeoutError: see `Moving.resume`.
        """
        read: Read | None = None
        try:
            left = min(timeout, handoff.expires - time.time())
            if left <= 0:
                raise TransferError(f"the lease of the request is over since {-left:.1f} s: its pages are not held")
            deadline = time.monotonic() + left
            own = self._end.read_plan(handoff, self._model.engine.moving.pages_of(number))
            if self._model.ranks is None:
                read = self._end.read(own)
            else:
                read = every = RanksRead(self._model, handoff, number, deadline)
                every.own = self._end.read(own)
            read.wait(deadline)
        except BaseException:
            self._drop(number, read)
            raise
        self._end.transport.finish(own)

    def _drop(self, number: int, read: Read | None) -> None:
        with self._model._shared.between_rounds():
            self._model.engine.drop(number, lambda: read is None or read.settled)


def comparable(own: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two fingerprints without what engines of different numbers of ranks cannot compare."""
    here, there = dict(own), dict(other)
    counts = {len(shares) for each in (here, there) if isinstance(shares := each.get(_SHARES), list)}
    if len(counts) == 2:
        del here[_SHARES], there[_SHARES]
    return here, there


@torch.no_grad()
def fingerprint(model: Any, weights: str, shares: list[str]) -> dict[str, Any]:
    """By name, all that must be equal for a request to go on in another engine with the same tokens and drafts.

    weights, shares: of the target, see `fingerprints_of_ranks`.
    """
    head, states = model.head, model.target.states
    modules = min(getattr(head, "num_modules", 1), max(model.num_speculative_tokens, 1))
    adapters = in_words(adapter_states(adapter_layers(model.hf_model)))
    formats = {r.group.name: r.group.format for r in model.runners}
    scales = {name: [list(pair) for pair in own.scales] for name, own in formats.items() if own.scales}
    found: dict[str, Any] = {
        "head": None if head is None else type(head).__name__,
        "target weights": weights + (f", adapters {adapters}" if adapters else ""),
        _SHARES: shares,
        "scales of an fp8 cache": scales,
        "recurrent states": None if states is None else [list(shape) for shape in states.moved_shapes],
        "draft_sampling": None if head is None else model.config.draft_sampling,
        "modules of the head": None if head is None else modules,
    }
    if head is not None:
        form = (repr(getattr(head, "spec", "")), head.attention_specs, head.aux_layers, head.draft_vocab_size)
        own = weights_fingerprint(head) if isinstance(head, torch.nn.Module) else ""
        found["head weights"] = f"{own} {form}"
    return found
