"""Columns of a data set as Ray Data gives them, and what comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdec.extensions.batches.records import TaskResult, answer_columns
from specdec.extensions.batches.tasks import Task, TaskDefaults, plain, tasks_of
from specdec.requests.sampling import SamplingParams
from tests.specdec.extensions.completions import completion

RUN = TaskDefaults(SamplingParams(max_new_tokens=9), seed=3)


def objects(*values: Any) -> np.ndarray:
    column = np.empty(len(values), object)
    column[:] = values
    return column


def test_prompts_of_every_kind_in_one_batch() -> None:
    messages = objects({"role": "user", "content": "a", "name": None})
    batch = {
        "prompt": objects("a", None, None),
        "messages": objects(None, messages, None),
        "token_ids": objects(None, None, np.array([1, 2])),
        "answer": np.arange(3),
    }
    first, second, third = tasks_of(batch, RUN)
    assert (first.prompt, second.prompt, third.prompt) == ("a", [{"role": "user", "content": "a"}], [1, 2])
    assert [task.error for task in (first, second, third)] == ["", "", ""]


def test_options_and_keys() -> None:
    batch = {
        "prompt": objects("a", "a", "a"),
        "params": objects({"temperature": 0.5, "seed": None, "max_tokens": np.int64(4)}, {"seed": 7}, None),
        "key": objects("x", "y", None),
    }
    first, second, third = tasks_of(batch, RUN)
    assert (first.params.temperature, first.params.max_new_tokens, second.params.seed) == (0.5, 4, 7)
    (moved,) = tasks_of({"prompt": ["b"], "key": ["x"]}, RUN)
    assert first.params.seed == moved.params.seed is not None and third.params.seed is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": None}, "a row has one of"),
        ({"prompt": "a", "params": {"n": 2, "temperature": 1.0}}, "n=2: a row has one answer"),
        ({"prompt": "a", "params": {"temprature": 1}}, "did you mean temperature"),
        ({"prompt": "a", "params": "hot"}, "params='hot': a dict of sampling options"),
        ({"prompt": "a", "key": 1.5}, "a key is a text or a whole number"),
        ({"other": 1}, "not none of them"),
    ],
)
def test_a_bad_row_is_an_error_of_its_own(row: dict[str, Any], message: str) -> None:
    (task,) = tasks_of({name: objects(value) for name, value in row.items()}, RUN)
    assert message in task.error


def test_answers_stand_beside_their_rows_in_order() -> None:
    batch = {"token_ids": objects(np.array([1]), np.array([2])), "answer": np.array([5, 6])}
    done = [TaskResult(Task(1), (completion("b"),)), TaskResult(Task(0), error="InvalidInputError: no")]
    found = answer_columns(batch, done)
    assert found["prompt_token_ids"] is batch["token_ids"] and found["answer"] is batch["answer"]
    assert found["text"].tolist() == ["", "b"] and found["error"].tolist() == ["InvalidInputError: no", ""]
    assert [ids.tolist() for ids in found["token_ids"]] == [[], [1, 2, 3]] and found["token_ids"][0].dtype == np.int64
    assert found["accepted"].tolist() == [0, 1] and found["finish_reason"].tolist() == ["", "length"]


def test_no_rows() -> None:
    assert tasks_of({}, RUN) == [] and tasks_of({"prompt": []}, RUN) == []
    assert len(answer_columns({"prompt": []}, [])["text"]) == 0


def test_values_become_pythons_own() -> None:
    given = {"a": np.int64(3), "b": None, "c": [np.array([1.5]), {"d": None}]}
    assert plain(given) == {"a": 3, "c": [[1.5], {}]} and type(plain(given)["a"]) is int


def test_options_of_the_chat_template_are_among_those_of_a_row() -> None:
    messages = objects({"role": "user", "content": "a"})
    batch = {"messages": objects(messages), "params": objects({"continue_final_message": True, "temperature": 0.5})}
    (found,) = tasks_of(batch, RUN)
    assert found.error == "" and found.params.temperature == 0.5
    assert found.prompt.options == {"add_generation_prompt": False, "continue_final_message": True}
