"""A batch as the parts that are planned apart: rows with short queries, and prompt chunks."""

from __future__ import annotations

from attention.backends.flashinfer.wrapper import Part
from attention.batch.metadata import CommonAttentionMetadata

_SHORT_QUERY = 16
"""Rows with at most this many query tokens are planned apart from prompt chunks: the kernel has one tile size per plan,
chosen from the mean query length."""


def whole_batch(metadata: CommonAttentionMetadata) -> Part:
    """All rows as one part."""
    host = metadata.host
    return Part(
        host.query_start_loc,
        host.page_indptr,
        host.seq_lens,
        metadata.query_start_loc,
        metadata.page_indptr,
        metadata.last_page_len,
        metadata.page_indices,
        0,
        host.num_tokens,
    )


def split_batch(metadata: CommonAttentionMetadata) -> tuple[Part, ...]:
    """Decode first: the leading rows with short queries, then everything from the first long one on."""
    host = metadata.host
    is_long = host.query_lens > _SHORT_QUERY
    cut = int(is_long.argmax()) if is_long.any() else host.num_reqs
    if cut in (0, host.num_reqs):
        return (whole_batch(metadata),)
    token = int(host.query_start_loc[cut])
    first, rest = slice(0, cut), slice(cut, host.num_reqs)
    starts, rest_starts = slice(0, cut + 1), slice(cut, host.num_reqs + 1)
    short = Part(
        host.query_start_loc[starts],
        host.page_indptr[starts],
        host.seq_lens[first],
        metadata.query_start_loc[starts],
        metadata.page_indptr[starts],
        metadata.last_page_len[first],
        metadata.page_indices,
        0,
        token,
    )
    long = Part(
        host.query_start_loc[rest_starts] - token,
        host.page_indptr[rest_starts],
        host.seq_lens[rest],
        metadata.query_start_loc[rest_starts] - token,
        metadata.page_indptr[rest_starts],
        metadata.last_page_len[rest],
        metadata.page_indices,
        token,
        host.num_tokens,
    )
    return short, long
