"""An answer cut into pieces that show its drafts: what was accepted, what was rejected, what the target said itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ACCEPTED, REJECTED, TARGET = "accepted", "rejected", "target"
_CONTEXT = 8  # tokens decoded before a piece, so that multi-byte characters and spaces come out right


def segments(tokenizer: Any, completion: Any) -> tuple[tuple[str, str], ...]:
    """(kind, text) pieces in reading order; () when the drafts were not returned.

    Kinds: "target" is a token of the target's own, "accepted" an accepted draft, "rejected" the first draft that the
    target refused and those after it (they are not part of the answer).
    """
    if completion.drafts is None or not completion.token_ids:
        return ()
    ids = list(completion.token_ids)
    pieces = [(TARGET, _piece(tokenizer, [], ids[:1]))]
    place = 1
    for record, drafts in zip(completion.stats.rounds, completion.drafts, strict=True):
        accepted = min(record.accepted, record.emitted)
        pieces.append((ACCEPTED, _piece(tokenizer, ids[:place], ids[place : place + accepted])))
        place += accepted
        if record.accepted < record.drafted:
            pieces.append((REJECTED, _piece(tokenizer, ids[:place], list(drafts[record.accepted :]))))
        own = record.emitted - accepted
        pieces.append((TARGET, _piece(tokenizer, ids[:place], ids[place : place + own])))
        place += own
    return tuple((kind, text) for kind, text in pieces if text)


def _piece(tokenizer: Any, before: Sequence[int], new: Sequence[int]) -> str:
    """The text that `new` adds after `before`."""
    if not new:
        return ""
    context = list(before[-_CONTEXT:])
    start = tokenizer.decode(context) if context else ""
    whole = tokenizer.decode(context + list(new))
    return str(whole[len(start) :] if whole.startswith(start) else tokenizer.decode(list(new)))
