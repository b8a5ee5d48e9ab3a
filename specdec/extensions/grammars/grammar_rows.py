"""Rows of a round whose requests have a grammar, and the masks of their positions. Imported with the first grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention.batch.host import offsets_within, owners_of
from attention.checking import require
from specdec.errors import SpecdecError
from specdec.extensions.grammars.compiled import GrammarCompiler
from specdec.extensions.grammars.following import RequestGrammar, RowMasks, allows
from specdec.interrupts import is_from_outside
from specdec.rounds.extras import EarlyDrafts
from specdec.rounds.transfer import DeviceRound

_BITS = 32


@dataclass(frozen=True)
class GrammarRows:
    """The decided rows of a round whose requests have a grammar, on the host.

    Attributes:
        requests: [m] their grammars. new_ids: [m] committed tokens of each after the prompt, bonus token included.
        places: [m] int64 where they are among the J decided rows. counts: [m] int64 drafts of each, and one.
    """

    requests: tuple[RequestGrammar, ...]
    new_ids: tuple[list[int], ...]
    places: np.ndarray
    counts: np.ndarray
    what: ClassVar[str] = "grammars of requests"

    def first_positions(self, rows: int) -> GrammarRows:
        """The rows with drafts among the first `rows` decided rows, reduced to their first position."""
        own = (self.counts > 1) & (self.places < rows)
        requests = tuple(compress(self.requests, own))
        new_ids = tuple(compress(self.new_ids, own))
        return GrammarRows(requests, new_ids, self.places[own], np.ones_like(self.counts[own]))

    def validate(self, query_lens: np.ndarray) -> None:
        """See `BatchExtra.validate`."""
        require(len(self.requests) == len(self.new_ids) == len(self.places), "grammars of other rows")
        require(bool((self.counts >= 1).all()), "grammars of rows that are not decided")


def masked(logits: Tensor, round_: DeviceRound, own: GrammarRows, drafts: EarlyDrafts | None) -> Tensor:
    """The logits [R', V] of a round, float32, with -inf for tokens that may not come."""
    banned = _banned(own, drafts, logits.device, logits.shape[1])
    scores = logits.float() if logits.dtype != torch.float32 else logits.clone()
    owner = owners_of(own.counts)
    places = np.stack([own.places[owner], offsets_within(own.counts)])
    place, offset = torch.from_numpy(places).to(logits.device, non_blocking=True)
    at = round_.logit_index[place, offset]
    if len(at) == len(scores):  # rows of logits are in the order of the batch
        return scores.masked_fill_(banned, float("-inf"))
    return scores.index_put_((at,), scores[at].masked_fill_(banned, float("-inf")))


def first_masked(logits: Tensor, own: GrammarRows, target_ids: Tensor, vocab_size: int) -> Tensor:
    """The head's logits of each row's first draft, masked as `masked` will; rows that would have none left stay."""
    first = own.first_positions(len(logits))
    if not len(first.places):
        return logits
    banned = _banned(first, None, logits.device, vocab_size)[:, target_ids]
    # Rows of -inf alone would give NaN probabilities.
    banned &= ~banned.all(1, keepdim=True)
    at = torch.from_numpy(first.places).to(logits.device)
    return logits.index_put((at,), logits[at].masked_fill(banned, float("-inf")))


def _banned(own: GrammarRows, drafts: EarlyDrafts | None, device: torch.device, size: int) -> Tensor:
    """[N, size] bool: which tokens may not come at each position."""
    known = [request.vocabulary.words for request in own.requests if request.vocabulary is not None]
    words = max(known, default=-(-size // _BITS))
    host = torch.empty(int(own.counts.sum()), words, dtype=torch.int32, pin_memory=device.type == "cuda")
    write_masks(own, drafts, host.numpy())
    bits = host.to(device, non_blocking=True)
    allowed = (bits[:, :, None] >> torch.arange(_BITS, device=bits.device, dtype=torch.int32)) & 1
    banned = allowed.view(len(bits), -1)[:, :size] == 0
    if banned.shape[1] < size:  # logits of the model beyond the vocabulary
        banned = torch.nn.functional.pad(banned, (0, size - banned.shape[1]), value=True)
    return banned


def write_masks(own: GrammarRows, drafts: EarlyDrafts | None, masks: np.ndarray) -> None:
    """Write the masks [N, W] int32 of all positions, row after row. Waits for the drafts."""
    masks[:] = -1
    read = None if drafts is None else drafts.wait()
    rows = []
    start = 0
    for request, new_ids, place, count in zip(own.requests, own.new_ids, own.places, own.counts.tolist(), strict=True):
        ids = read[place, : count - 1].tolist() if read is not None and count > 1 else []
        length = request.prompt_len + len(new_ids)
        rows.append(_Row(request, _masks_of(request, new_ids, length, ids, masks.shape[1]), length, start))
        start += count
    compiled: dict[GrammarCompiler, list[_Row]] = {}
    for row in rows:
        if row.request.vocabulary is not None:
            compiled.setdefault(row.request.vocabulary, []).append(row)
    returned = True
    for vocabulary, mine in compiled.items():
        for row in mine:
            masks[row.within] = vocabulary.only_end  # kept where the grammar has ended
        chains = [(matcher, row.start + at, ids) for row in mine for matcher, at, ids in row.masks.chains]
        returned &= vocabulary.fill(chains, masks, any(row.request.can_loop for row in mine))
    for row in rows:
        for at, ready in row.masks.ready.items():
            masks[row.start + at] = -1 if ready is None else ready
    _note_dead_ends(rows, masks, returned)
    for vocabulary, mine in compiled.items():
        _end_as_requests_do(mine, masks, vocabulary)


class _Row(NamedTuple):
    """One request of a round. length: its committed tokens, prompt included. start: its first row of the masks."""

    request: RequestGrammar
    masks: RowMasks
    length: int
    start: int

    @property
    def within(self) -> list[int]:
        """Its rows of the masks in which the grammar decides."""
        return [self.start + at for at in self.masks.within]

    def note(self, at: int, reason: str) -> None:
        """Note why no token can come at a position of it."""
        error = SpecdecError(f"the grammar cannot go on: {reason}")
        self.request.note(self.length + at, self.masks.drafts[:at], error)


def _masks_of(request: RequestGrammar, new_ids: list[int], length: int, drafts: list[int], words: int) -> RowMasks:
    """A row's masks. An exception of a user's matcher ends only its own request."""
    try:
        request.follow(new_ids)
        return request.masks(drafts, words)
    except Exception as error:
        if is_from_outside(error):
            raise
        request.note(length, [], error)
        return RowMasks(drafts)


def _end_as_requests_do(rows: Sequence[_Row], masks: np.ndarray, vocabulary: GrammarCompiler) -> None:
    """Replace llguidance's end id in the masks by each request's own end ids.

    An end id that is a special token is allowed only where the grammar may end. An end id that is text is also allowed
    where the grammar has that text; it ends the grammar only if the request has no special end id.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        groups.setdefault(row.request.ends, []).extend(row.within)
    eos = vocabulary.eos
    for ends, found in groups.items():
        over = allows(masks, eos)[found]
        special = [end for end in ends if end == eos or vocabulary.tokenizer.is_special_token(end)]
        for end in special:
            _set(masks, found, end, over)
        for end in () if special else ends:
            _set(masks, found, end, over | allows(masks, end)[found])
        if ends and eos not in ends:
            _set(masks, found, eos, np.zeros_like(over))


def _set(masks: np.ndarray, rows: list[int], token_id: int, on: np.ndarray) -> None:
    # By way of uint32: 1 << 31 is beyond int32.
    word = token_id // _BITS
    bit = np.uint32(1 << token_id % _BITS).view(np.int32)
    if word < masks.shape[1]:
        masks[rows, word] = np.where(on, masks[rows, word] | bit, masks[rows, word] & ~bit)


def _note_dead_ends(rows: Sequence[_Row], masks: np.ndarray, returned: bool) -> None:
    """Note positions at which no token is allowed; a request that reaches such a position ends with an error.

    returned: whether masks were filled; else each row is filled again alone, to find the row that blocks llguidance.
    """
    for row in rows:
        own = masks[row.start : row.start + len(row.masks.drafts) + 1]
        chains = row.masks.chains
        if chains and (not returned or any(matcher.is_error() for matcher, _, _ in chains)):
            found = row.request.dead_end(row.masks.drafts, own)
            if found is not None:
                row.note(*found)
        for at in np.flatnonzero(~own.any(1)).tolist():
            row.note(at, "no token of the vocabulary may come next")
            own[at] = -1
