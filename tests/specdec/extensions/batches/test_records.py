"""Lines of answers, in our own form and in OpenAI's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specdec.extensions.batches.lines import Key
from specdec.extensions.batches.records import LEAST, TaskResult, line_of, record_of, row_number
from specdec.extensions.batches.tasks import Task
from specdec.requests.logprobs import TokenLogprobs
from specdec.requests.sampling import SamplingParams
from tests.fakes import LetterTokenizer
from tests.specdec.extensions.completions import completion

TOLD = (TokenLogprobs(1, -0.5, 0, ((1, -0.5), (2, -1.0))), TokenLogprobs(2, float("-inf"), 3, ((1, -0.1), (4, -2.0))))


def record(task: Task, *completions: Any, error: str = "") -> Any:
    made = record_of(TaskResult(task, completions, error), LetterTokenizer())
    assert made.data.endswith(b"\n") and made.data.count(b"\n") == 1 and made.failed == bool(error)
    fields = json.loads(made.data)
    assert row_number(fields) == made.number == task.number
    return fields


def test_a_row_of_ours() -> None:
    assert record(Task(7, Key("id", 5), kept={"metadata": {"a": 1}}), completion()) == {
        "id": 5,
        "line": 7,
        "metadata": {"a": 1},
        "error": None,
        "text": "ab",
        "token_ids": [1, 2, 3],
        "finish_reason": "length",
        "prompt_tokens": 4,
        "new_tokens": 3,
        "rounds": 1,
        "drafted": 3,
        "accepted": 1,
    }
    assert record(Task(7), error="InvalidInputError: no") == {"line": 7, "error": "InvalidInputError: no"}


def test_samples_and_what_was_asked_for() -> None:
    sampled = Task(1, params=SamplingParams(n=2, temperature=1.0))
    found = record(sampled, completion("a", sample_index=0), completion("b", sample_index=1))
    assert [one["text"] for one in found["completions"]] == ["a", "b"] and "text" not in found
    more = record(Task(1), completion(logprobs=TOLD, drafts=((1, 2),), prompt_logprobs=(None, TOLD[0])))
    assert more["logprobs"][1] == {"token_id": 2, "logprob": LEAST, "rank": 3, "top": [[1, -0.1], [4, -2.0]]}
    never = (TokenLogprobs(1, -0.5, 0, ((1, -0.5), (2, float("-inf")))),)
    assert record(Task(1), completion(logprobs=never))["logprobs"][0]["top"] == [[1, -0.5], [2, LEAST]]
    assert more["drafts"] == [[1, 2]] and more["prompt_logprobs"][0] is None


def test_a_chat_of_openais() -> None:
    task = Task(3, Key("custom_id", "q"), "chat.completion", kept={"model": "m"})
    found = record(task, completion(finish_reason="eos", logprobs=TOLD))
    response = found["response"]
    assert (found["id"], found["custom_id"], found["error"]) == ("batch_req_3", "q", None)
    assert (response["status_code"], response["request_id"], response["body"]["model"]) == (200, "batch_req_3", "m")
    (choice,) = response["body"]["choices"]
    assert choice["message"] == {"role": "assistant", "content": "ab"} and choice["finish_reason"] == "stop"
    token = choice["logprobs"]["content"][1]
    assert (token["token"], token["bytes"], token["logprob"]) == ("c", [99], LEAST)
    assert [top["token"] for top in token["top_logprobs"]] == ["b", "e"]
    details = {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 2}
    usage = {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7, "completion_tokens_details": details}
    usage |= {"prompt_tokens_details": {"cached_tokens": 0}}
    assert response["body"]["usage"] == usage and response["body"]["object"] == "chat.completion"


def test_texts_of_openais() -> None:
    task = Task(3, Key("custom_id", "q"), "text_completion", kept={"model": "m"})
    found = record(task, completion("a", logprobs=TOLD), completion("b", finish_reason="timeout", sample_index=1))
    first, second = found["response"]["body"]["choices"]
    assert first["text"] == "a" and first["logprobs"]["tokens"] == ["b", "c"]
    assert first["logprobs"]["text_offset"] == [0, 1] and first["logprobs"]["token_logprobs"] == [-0.5, LEAST]
    assert (second["index"], second["finish_reason"], second["logprobs"]) == (1, "length", None)
    usage = found["response"]["body"]["usage"]
    counts = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
    assert counts == (4, 6, 10), "a prompt counts once, whatever n is"


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        ("InvalidInputError: no", 400, "invalid_request_error"),
        ("CacheTooSmallError: no", 400, "invalid_request_error"),
        ("RoundFailedError: no", 500, "server_error"),
    ],
)
def test_an_error_of_openais(error: str, status: int, kind: str) -> None:
    found = record(Task(3, Key("custom_id", "q"), "chat.completion"), error=error)
    assert found["response"]["status_code"] == status and found["response"]["body"]["error"]["type"] == kind
    assert found["error"] == {"code": error.partition(":")[0], "message": "no"}


def test_text_that_is_no_unicode_is_escaped() -> None:
    assert json.loads(line_of({"a": "\ud800é"})) == {"a": "\ud800é"}
    assert line_of({"a": "é"}) == '{"a": "é"}\n'.encode()


@pytest.mark.parametrize("fields", [{}, [], {"line": 0}, {"line": True}, {"line": "3"}, {"id": "x"}, {"id": None}, 5])
def test_what_is_no_record(fields: Any) -> None:
    with pytest.raises((ValueError, LookupError, TypeError)):
        row_number(fields)
