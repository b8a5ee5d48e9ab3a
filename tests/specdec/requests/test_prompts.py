"""Prompts of token ids: read as they are, and refused by their number before anything else is read."""

from __future__ import annotations

import re
import time

import pytest

from specdec.errors import InvalidInputError
from specdec.requests.prompts import encode_prompts, split_prompts


def test_of_too_many_ids_only_the_first_is_read() -> None:
    """Reading all of them holds up every other thread of a server."""
    ids = [5] * 300_000 + [None]
    began = time.thread_time()
    for prompts, name in (ids, ""), ([[1], ids], "prompt 1: "):
        with pytest.raises(InvalidInputError, match=f"^{name}the prompt has 300001 tokens; with max_model_len=64"):
            encode_prompts(prompts, None, 64)
    assert time.thread_time() - began < 0.01  # 5 ms for each time they are read


def test_what_is_no_id_is_named_by_its_place() -> None:
    words = "a prompt of token ids has None (NoneType) at index 2, which is no whole number"
    with pytest.raises(InvalidInputError, match=re.escape(words)):
        encode_prompts([5, 5, None], None, 64)


def test_ids_of_other_sequences_are_read() -> None:
    assert encode_prompts(range(3, 6), None) == [[3, 4, 5]] == encode_prompts((3, 4, 5), None)
    assert split_prompts([[3], [4]]) == [[3], [4]] and encode_prompts({"input_ids": [(3, 4), [5]]}, None) == [
        [3, 4],
        [5],
    ]
