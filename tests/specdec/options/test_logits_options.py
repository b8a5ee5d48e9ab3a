"""Options that change logits: what is read, what is refused by name, and that None leaves them to the model's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdec.errors import InvalidInputError
from specdec.options.logits_options import OFF, LogitsOptions
from specdec.requests.sampling import SamplingParams

READ: list[tuple[str, Any, Any]] = [
    ("repetition_penalty", 2, 2.0),
    ("frequency_penalty", np.float32(-0.5), -0.5),
    ("no_repeat_ngram_size", np.int64(3), 3),
    ("sequence_bias", {(3, 4): 2, (5,): -1.0}, (((3, 4), 2.0), ((5,), -1.0))),
    ("sequence_bias", [[[3, 4], 2.0]], (((3, 4), 2.0),)),
    ("logit_bias", {"7": -100, 8: 1.5}, ((7, -100.0), (8, 1.5))),
    ("bad_words_ids", [[3], (4, 5)], ((3,), (4, 5))),
    ("suppress_tokens", np.array([4, 5]), (4, 5)),
    ("forced_eos_token_id", 6, (6,)),
    ("allowed_token_ids", [9, 3, 9], (3, 9)),
    ("exponential_decay_length_penalty", [5, 1.01], (5, 1.01)),
    ("top_h", 0.4, 0.4),
    ("renormalize_logits", True, True),
]
REFUSED: list[tuple[str, Any]] = [
    ("repetition_penalty", 0.0),
    ("repetition_penalty", "1.2"),
    ("presence_penalty", float("nan")),
    ("presence_penalty", float("inf")),
    ("no_repeat_ngram_size", 1.5),
    ("no_repeat_ngram_size", -1),
    ("min_new_tokens", True),
    ("sequence_bias", {(): 1.0}),
    ("sequence_bias", {(3,): float("inf")}),
    ("sequence_bias", "abc"),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {3: None}),
    ("logit_bias", [3, 4]),
    ("bad_words_ids", [3, 4]),
    ("bad_words_ids", [[]]),
    ("suppress_tokens", "34"),
    ("suppress_tokens", [1.5]),
    ("allowed_token_ids", []),
    ("forced_bos_token_id", [1]),
    ("exponential_decay_length_penalty", (1, 0.0)),
    ("exponential_decay_length_penalty", 3),
    ("typical_p", 0.0),
    ("top_h", 1.5),
    ("eta_cutoff", 1.0),
    ("remove_invalid_values", 1),
]


@pytest.mark.parametrize(("name", "given", "kept"), READ, ids=[name for name, *_ in READ])
def test_what_is_read(name: str, given: Any, kept: Any) -> None:
    params = SamplingParams(**{name: given})
    assert getattr(params, name) == kept
    assert params.settings == {name: kept} and hash(params) is not None


@pytest.mark.parametrize(("name", "given"), REFUSED, ids=[f"{name}-{n}" for n, (name, _) in enumerate(REFUSED)])
def test_what_is_refused_by_name(name: str, given: Any) -> None:
    with pytest.raises(InvalidInputError, match=name):
        SamplingParams(**{name: given})


def test_off_does_nothing_and_none_is_unset() -> None:
    assert LogitsOptions().settings == LogitsOptions(**OFF).settings == {}
    assert all(getattr(LogitsOptions(), name) is None for name in OFF)


def test_ids_that_cannot_be_generated_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="no token could be generated"):
        SamplingParams(allowed_token_ids=[3, 4], suppress_tokens=[3, 4, 5])
    with pytest.raises(InvalidInputError, match="no token could be generated"):
        SamplingParams(allowed_token_ids=[3, 4], suppress_tokens=[4, 3])
    SamplingParams(allowed_token_ids=[3], bad_words_ids=[[3]])  # 3 may end the request: then it is no bad word
    SamplingParams(allowed_token_ids=[3, 4], suppress_tokens=[3], bad_words_ids=[[4, 4]])
    assert SamplingParams(allowed_token_ids=[3, 4], suppress_tokens=[3]).token_ids == {3, 4}
    assert SamplingParams(forced_bos_token_id=9, begin_suppress_tokens=[2], forced_eos_token_id=7).token_ids == {
        2,
        7,
        9,
    }
    assert SamplingParams(sequence_bias={(1, 2): 1.0}, logit_bias={5: 1.0}, bad_words_ids=[[8]]).token_ids == {
        1,
        2,
        5,
        8,
    }


@pytest.mark.parametrize(
    "given",
    [
        {"logit_bias": {5: 3e38}, "temperature": 0.5},
        {"logit_bias": {5: 1e39}},
        {"sequence_bias": {(5,): 2e38}, "logit_bias": {5: 2e38, 6: -3e38}, "temperature": 2.0},
        {"sequence_bias": {(1, 5): 2e38, (2, 5): 2e38, (5, 1): 3e38}, "temperature": 2.0},
    ],
)
def test_biases_that_are_infinite_in_float32_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=r"biases of token 5 that add up to \de\+3\d, at .*infinite in float32"):
        SamplingParams(**given)
    SamplingParams(logit_bias={5: 3e38, 6: -3e38, 7: float("-inf")}, temperature=1.0)
    SamplingParams(logit_bias={5: 3e38})
    SamplingParams(logit_bias={5: 2e38, 6: 2e38}, sequence_bias={(5, 7): 2e38})
