"""On a GPU the verification is queued after the draft loop before the host goes on; here the same order on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import (
    engine_of,
    free_everywhere,
    hf_greedy,
    launch_ahead,
    random_prompts,
    table_head,
    tiny_llama,
    wrap,
    wrong_rounds,
)

from specdec.requests.sampling import SamplingParams

PROMPTS = random_prompts((5, 33, 1, 17, 60, 9))
PARAMS = SamplingParams(max_new_tokens=24, return_drafts=True)
AUX_LAYERS = (1, 2, 3)


def ahead(**options: Any) -> Any:
    model = tiny_llama()
    wrapped = wrap(model, table_head(model, aux_layers=AUX_LAYERS), num_speculative_tokens=3, **options)
    launch_ahead(wrapped)
    return wrapped


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_tokens": 88, "max_num_seqs": 6},
        pytest.param({}, marks=pytest.mark.long),
        {"max_num_batched_tokens": 13},
    ],
)
@pytest.mark.cases(1)
def test_tokens_and_drafts_are_the_same(options: dict[str, int]) -> None:
    wrapped = ahead(**options)
    completions = wrapped.generate(PROMPTS, PARAMS)
    assert [c.token_ids for c in completions] == [hf_greedy(p, 24) for p in PROMPTS]
    assert [wrong_rounds(wrapped.head, c) for c in completions] == [[]] * len(PROMPTS)
    assert free_everywhere(wrapped)


def test_rows_that_end_or_are_aborted_leave_the_others_alone() -> None:
    wrapped = ahead(max_num_seqs=4)
    engine = engine_of(wrapped)
    stop = hf_greedy(PROMPTS[0], 24)[7]
    params = [SamplingParams(max_new_tokens=24, stop_token_ids=(stop,)), *[PARAMS] * 5]
    ids = [engine.submit(p, own) for p, own in zip(PROMPTS, params, strict=True)]
    done: dict[int, list[int]] = {}
    for turn in range(300):
        if turn == 5:
            engine.abort([ids[1], ids[4]])
        if not engine.has_work:
            break
        done |= {u.request_id: u.completion.token_ids for u in engine.step() if u.completion is not None}
    right = hf_greedy(PROMPTS[0], 24)
    assert done.pop(ids[0]) == right[: right.index(stop) + 1]
    assert done == {ids[i]: hf_greedy(PROMPTS[i], 24) for i in (2, 3, 5)}
    assert free_everywhere(wrapped)


def test_the_users_own_forward_between_two_rounds_does_not_spoil_the_drafts() -> None:
    """The aux hidden states of a queued verification wait in a buffer; a forward of the user must not write there."""
    wrapped = ahead()
    completion = None
    for update in wrapped.stream(PROMPTS[3], PARAMS):
        with torch.no_grad():
            wrapped.hf_model(torch.tensor([PROMPTS[0]]))
        completion = update.completion
    assert completion is not None and completion.token_ids == hf_greedy(PROMPTS[3], 24)
    assert wrong_rounds(wrapped.head, completion) == []
