"""Which tokens of a launch are padding, for operators that can skip them, such as experts chosen only by padding."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from attention.batch.metadata import CommonAttentionMetadata

Padding = tuple[Tensor, int]
"""Slots of the tokens of a launch, and the size of a page."""


class _Known(threading.local):
    batch: Padding | None = None


_known = _Known()


@contextmanager
def padding_known(metadata: CommonAttentionMetadata) -> Iterator[None]:
    """Inside, launches on this thread read the tokens of a batch, some of which may be padding.

    A token is padding where its slot lies in the null page. Its results are noise, and may be any finite numbers.
    """
    before = _known.batch
    _known.batch = (metadata.slot_mapping, metadata.host.page_size)
    try:
        yield
    finally:
        _known.batch = before


def padding_among(num_tokens: int) -> Padding | None:
    """Slots [T] of the tokens that a launch reads, and the size of a page: slots below it are padding's. None where
    they are not known."""
    known = _known.batch
    return None if known is None or len(known[0]) != num_tokens else known
