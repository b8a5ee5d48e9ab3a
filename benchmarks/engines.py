"""The public model over a pair, as benchmarks measure it, and its sizes for batches of so many rows."""

from __future__ import annotations

from typing import Any

from benchmarks.shapes import Pair
from benchmarks.synthetic import Tokenizer
from specdec.model import SpeculativeModel


def wrapped(pair: Pair, drafts: int, **options: Any) -> SpeculativeModel:
    """The public model. options: more arguments of `from_pretrained`; prompts are read whole unless they say so."""
    return SpeculativeModel.from_pretrained(
        pair.target,
        pair.head if drafts else None,
        num_speculative_tokens=drafts,
        tokenizer=Tokenizer(),
        **{"enable_prefix_caching": False} | options,
    )


def sizes_of(
    drafts: int, batches: list[int], prompt: int, new_tokens: int, long: int | None, page_size: int = 16
) -> dict[str, int]:
    """Options for batches of so many rows: room for `prompt` and `new_tokens` tokens a row, and for a long one.

    Prompts are read in as few rounds as go, beside rows that decode too: else the first rows of a large batch end
    before the last ones have begun.

    >>> [sizes_of(5, [8, 16], 512, 256, long)["kv_cache_tokens"] for long in (None, 65_536)]
    [12544, 77568]
    """
    short, longest = prompt + new_tokens + 16, max(prompt, long or 0) + new_tokens + 16
    rows = max(batches)
    tokens = max(8192, rows * (drafts + 1))
    return {
        "max_model_len": longest,
        "max_num_seqs": rows,
        "max_num_batched_tokens": tokens,
        "max_num_prefill_tokens": tokens,
        "page_size": page_size,
        "kv_cache_tokens": ((rows - 1) * -(-short // page_size) + -(-longest // page_size)) * page_size,
    }
