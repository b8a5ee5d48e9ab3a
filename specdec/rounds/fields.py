"""The fields of the round's staging arena and their buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attention.batch.metadata import batch_fields, batch_sizes
from attention.batch.staging import Bucket, Field, bucket_of
from specdec.config import EngineConfig

if TYPE_CHECKING:
    from specdec.rounds.verification import DraftArrays, TargetArrays


def draft_fields() -> list[Field]:
    """The arrays of a draft loop."""
    return [
        *batch_fields("first"),
        *(Field(f"first.{name}", np.int64, ("first.tokens",)) for name in ("token_ids", "token_indices")),
        Field("first.last_row", np.int64, ("first.rows",)),
        Field("step.block_table", np.int32, ("first.rows", "first.pages")),
        *step_fields(),
    ]


def step_fields() -> list[Field]:
    """The arrays of the draft steps after the first pass."""
    return [
        Field("step.query_start_loc", np.int32, ("first.rows_plus_1",)),
        Field("step.page_indices", np.int32, ("steps", "first.rows_times_pages")),
        Field("step.page_indptr", np.int32, ("steps", "first.rows_plus_1")),
        Field("step.last_page_len", np.int32, ("steps", "first.rows")),
        Field("step.seq_lens", np.int32, ("steps", "first.rows")),
        Field("step.slot_mapping", np.int64, ("steps", "first.rows")),
        Field("step.positions", np.int64, ("steps", "first.rows")),
    ]


def target_fields() -> list[Field]:
    """The arrays of a verification."""
    per_token = ("token_ids", "draft_places", "draft_sources", "judged_rows")
    return [
        *batch_fields("target"),
        *(Field(f"target.{name}", np.int64, ("target.tokens",)) for name in per_token),
        Field("target.logit_index", np.int64, ("target.rows", "drafts_plus_1")),
        Field("target.num_drafts", np.int64, ("target.rows",)),
        Field("target.sources", np.int64, ("target.rows",)),
    ]


def head_fields() -> list[Field]:
    """What a verification needs of the head's pages, so that the first pass can run right behind it."""
    return [
        Field("head.slot_mapping", np.int64, ("target.tokens",)),
        Field("head.page_indices", np.int32, ("target.rows_times_pages",)),
    ]


def round_fields() -> list[Field]:
    """Every array that a round may send in one transfer."""
    return [
        *target_fields(),
        *draft_fields(),
        *(Field(f"sampling.{name}", np.float32, ("target.rows",)) for name in ("temperature", "top_p", "min_p")),
        Field("sampling.top_k", np.int32, ("target.rows",)),
        Field("sampling.draft_uniform", np.float32, ("target.rows", "drafts")),
        Field("sampling.accept_uniform", np.float32, ("target.rows", "drafts")),
        Field("sampling.next_uniform", np.float32, ("target.rows", "drafts_plus_1")),
    ]


def round_bucket(draft: DraftArrays | None, target: TargetArrays) -> Bucket:
    """The bucket of a round: rows and tokens rounded up to powers of two."""
    pages = target.block_table.shape[1]
    first = (0, 0) if draft is None else (draft.first.num_reqs, draft.first.num_tokens)
    return _bucket((len(target.start), target.num_tokens), first, pages, target.max_drafts)


def graph_bucket(config: EngineConfig, rows: int) -> Bucket:
    """The bucket of every round that a CUDA graph of `rows` rows reads: fixed addresses, whatever the lengths."""
    drafts, pages = config.num_speculative_tokens, most_pages(config)
    sizes: dict[str, int] = {}
    for name in ("target", "first"):
        sizes |= batch_sizes(name, rows, rows * (drafts + 1), pages)
        padding = rows * (1 - (-(drafts + 1) // config.page_size))  # of the null page, behind every row
        sizes[f"{name}.rows_times_pages"] = min(rows * pages, config.num_head_pages + padding)
    return bucket_of(drafts=drafts, drafts_plus_1=drafts + 1, steps=max(drafts - 1, 0), **sizes)


def largest_bucket(config: EngineConfig) -> Bucket:
    """A bucket that every round fits in."""
    size = (config.max_num_seqs, config.max_num_batched_tokens)
    return _bucket(size, size, most_pages(config), config.num_speculative_tokens)


def most_pages(config: EngineConfig) -> int:
    """Pages of the longest row, padding tokens behind its own included."""
    return -(-(config.max_model_len + config.num_speculative_tokens + 1) // config.page_size)


def _bucket(target: tuple[int, int], first: tuple[int, int], pages: int, drafts: int) -> Bucket:
    sizes = batch_sizes("target", power_of_two(target[0]), power_of_two(target[1]), pages)
    sizes |= batch_sizes("first", power_of_two(first[0]), power_of_two(first[1]), pages)
    return bucket_of(drafts=drafts, drafts_plus_1=drafts + 1, steps=max(drafts - 1, 0), **sizes)


def power_of_two(n: int) -> int:
    """The smallest power of two >= n; 0 for 0."""
    return 1 << max(n - 1, 0).bit_length() if n else 0
