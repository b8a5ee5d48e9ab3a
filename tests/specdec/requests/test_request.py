"""A request takes rounds: what it keeps of each, where it ends, and what is left when it goes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes import LetterTokenizer

from specdec.engine.ends import rewound
from specdec.requests.request import Progress, Request, RowRound, Times
from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import RoundRecord
from specdec.requests.text import TextStream, Vocabulary

PROMPT = np.arange(4, dtype=np.int32)


def ids(text: str) -> list[int]:
    return LetterTokenizer()(text)["input_ids"]


def request(number: int = 0, turn: int = 0, **params: Any) -> Request:
    own = SamplingParams(**params)
    stream = TextStream(Vocabulary(LetterTokenizer()), own.stop)
    return Request(number, own, 4, 40, 3, 1, PROMPT, stream, 0, (), Times(1.0, 2.0), turn=turn)


def round_(text: str, drafts: str = "", accepted: int | None = None) -> RowRound:
    """Tokens that a round commits, and its drafts, of which all but the last token were accepted."""
    return RowRound(ids(text), len(text) - 1 if accepted is None else accepted, tuple(ids(drafts)))


def reported(own: Request, each: RowRound) -> Any:
    update = own.take(each, 3.0)
    own.progress = update.progress
    return update


def test_the_prompts_pass_is_no_round() -> None:
    own = request()
    assert reported(own, round_("a")).text == "a" and own.rounds == [] and own.times.first_token == 3.0
    assert reported(own, round_("bcd", "bcx")).token_ids == ids("bcd")
    assert own.rounds == [RoundRecord(3, 2, 3)] and own.drafts == [tuple(ids("bcx"))]


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"stop_token_ids": ids("xc")}, "abc"),  # the second of two stop ids, which is kept
        ({"stop": "cd"}, "ab"),
        ({"stop": "cd", "stop_token_ids": ids("e")}, "ab"),  # a stop string before a stop id
        ({"stop": "ef", "stop_token_ids": ids("d")}, "abcd"),  # and after one
    ],
)
def test_a_stop_ends_a_request_within_a_round(params: dict[str, Any], text: str) -> None:
    own = request(return_drafts=True, **params)
    reported(own, round_("a"))
    update = own.take(round_("bcdef", "bcdeq"), 5.0)
    done = update.completion
    assert done is not None and done.finish_reason == "stop" and done.text == text
    kept = {"abc": 3, "ab": 4, "abcd": 4}[text]
    assert done.token_ids == ids("abcdef")[:kept] and update.token_ids == done.token_ids[1:]
    assert done.stats.rounds == (RoundRecord(5, 4, kept - 1),), "tokens after a stop were not emitted"
    assert done.drafts == (tuple(ids("bcdeq")),) and (done.stats.prompt_tokens, done.stats.new_tokens) == (4, kept)
    assert (done.stats.queue_s, done.stats.prefill_s, done.stats.decode_s) == (1.0, 1.0, 2.0)


def test_a_request_goes_back_to_what_was_reported() -> None:
    """And goes on from there as if the rounds after it had never been."""
    own = request(stop="yz")
    reported(own, round_("a"))
    reported(own, round_("bc", "bx"))
    before = own.progress
    own.take(round_("def", "de"), 4.0)
    own.row, own.finish_reason, own.has_pages = 2, "length", True
    own.rewind()
    assert own.progress == before == Progress(3, 1, 3)
    assert (own.row, own.finish_reason, own.has_pages) == (-1, None, False)
    assert own.new_tokens == ids("abc") and own.committed.tolist() == [*PROMPT, *ids("abc")]
    assert own.rounds == [RoundRecord(2, 1, 2)] and own.drafts == [tuple(ids("bx"))]
    assert own.stream.num_shown == 3
    assert reported(own, round_("gyz", "gy")).completion.text == "abcg"


def test_requests_of_torn_tables_wait_in_order_of_their_turns() -> None:
    """Those that had a row are read again; each goes back to what was reported of it."""
    requests = [request(number, turn) for number, turn in ((0, 2), (1, 0), (2, 1))]
    for own in requests[1:]:
        reported(own, round_("a"))
        own.take(round_("b", "b", 0), 4.0)
        own.row = own.id
    waiting, ran = rewound(requests)
    assert [own.id for own in waiting] == [1, 2, 0] and ran == 2
    assert [own.preemptions for own in waiting] == [1, 1, 0]
    assert [own.new_tokens for own in waiting] == [ids("a"), ids("a"), []] and all(own.row == -1 for own in waiting)
