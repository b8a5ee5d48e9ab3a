"""What the extras of options and log-probabilities take from a row and from a round that was launched ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdec.logits.extra import ChangedRows, OptionColumns, subject_of
from specdec.logits.logprobs import AskingColumns, _described, prompt_rows
from specdec.logits.processing import filters_of
from specdec.requests.logprobs import PromptLogprobs, TokenLogprobs
from specdec.requests.sampling import SamplingParams

TOLD = TokenLogprobs(1, -1.0, 0)


def table(**columns: Any) -> Any:
    """A row table of one row."""
    own = {"eos": [[3, -1]], "prompt": [4], "limit": [20], "computed": [0], "length": [4], **columns}
    return SimpleNamespace(leave_unfiltered=lambda row: None, **{name: np.array(own[name]) for name in own})


def test_what_ends_a_request_is_what_its_options_hold_back() -> None:
    """Its model's eos ids and its own stop ids."""
    found = subject_of(SamplingParams(min_new_tokens=3, stop_token_ids=(9, 11)), table(), 0)
    assert found is not None and (found.ends, found.prompt_len, found.limit) == ((3, 9, 11), 4, 20)
    assert subject_of(SamplingParams(), table(), 0) is None


def test_filters_are_of_sampled_requests() -> None:
    assert filters_of(SamplingParams(typical_p=0.5)) is None
    found = filters_of(SamplingParams(temperature=0.7, typical_p=0.5, top_k=5))
    assert found == (0.7, None, 5, 1.0, 0.0, 0.5, None, None)
    assert filters_of(SamplingParams(temperature=0.7, top_k=5)) is None, "the round applies them"


def test_a_round_launched_ahead_sees_the_tokens_that_the_last_one_accepted() -> None:
    """Which are not in the table yet: two accepted drafts, before the token that the round decided."""
    columns = OptionColumns(1)
    rows = table(tokens=[[5, 6, 7, 8, 0, 0, 0, 0]])
    columns.open(rows, 0, SamplingParams(repetition_penalty=1.5))
    schedule: Any = SimpleNamespace(rows=np.array([0]), num_new=np.array([1]), num_drafts=np.array([2]))
    last: Any = object()
    found = columns.after(rows, last, schedule, np.array([6]), np.array([2]), np.array([[1, 2, 4]]))
    assert isinstance(found, ChangedRows) and found.lens.tolist() == [7]
    assert found.committed[0, :6].tolist() == [5, 6, 7, 8, 1, 2]


def asking(start: int, most: int, told: int = 0) -> AskingColumns:
    columns, own = AskingColumns(2, most), PromptLogprobs(0, start)
    for position in range(own.start, own.start + told):
        own.tell(position, TOLD)
    columns.open(table(), 0, SamplingParams(prompt_logprobs=0))
    params = columns.own[0]
    assert params is not None
    object.__setattr__(params, "prompt_logprobs", own)
    return columns


@pytest.mark.parametrize(
    ("start", "computed", "told", "chunk"),
    [
        (1, 0, 0, 4),  # rows 0 to 3
        (11, 0, 0, 14),  # ten tokens that are not asked for, then rows 10 to 13
        (11, 8, 0, 6),
        (1, 0, 30, 34),  # after a preemption: what was told is read again, and not asked for
        (90, 0, 0, 40),
    ],
)
def test_a_chunk_of_a_prompt_ends_where_a_round_has_no_more_rows(
    start: int, computed: int, told: int, chunk: int
) -> None:
    columns = asking(start, 4, told)
    assert columns.chunk(table(computed=[computed], prompt=[60]), 0, 40, ()) == chunk


def test_the_last_row_of_a_prompt_tells_of_the_first_new_token() -> None:
    assert asking(1, 99).chunk(table(prompt=[60]), 0, 60, ()) == 60
    assert asking(1, 59).chunk(table(prompt=[60]), 0, 60, ()) == 60, "59 rows tell of the prompt"


def test_there_are_as_many_alternatives_as_tokens() -> None:
    found = _described(torch.tensor([[-1.0, -2.0, -0.5]]), torch.tensor([[1]]), 9)
    assert found.tolist() == [[-2.0, 2.0, 2.0, 0.0, 1.0, -0.5, -1.0, -2.0]]


def test_rows_of_prompts_take_so_much_memory() -> None:
    assert [prompt_rows(size) for size in (128_256, 1000, 10**9)] == [261, 512, 1]
