"""Which failures end a run: those of rounds, one after the other, more of them than the batch has rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.errors import InvalidInputError, RequestFailedError, RoundFailedError
from specdec.extensions.batches import records
from specdec.extensions.batches.records import TaskResult, answered
from specdec.extensions.batches.tasks import Task
from specdec.requests.sampling import SamplingParams
from tests.specdec.extensions.completions import completion

ROWS = 2
ROUND, REQUEST, REFUSED = RoundFailedError("device"), RequestFailedError("own"), InvalidInputError("bad")


def answers(
    monkeypatch: pytest.MonkeyPatch, ends: Sequence[Any], params: SamplingParams | None = None
) -> Iterator[TaskResult]:
    """Of tasks that end so, in this order; (item, end) where an item has several."""
    each = [end if isinstance(end, tuple) else (i, end) for i, end in enumerate(ends)]

    class Fed:
        def __init__(self, opened: Any, tasks: Iterator[Task], rows: int) -> None:
            assert rows == ROWS and len(list(tasks)) == 1 + max(item for item, _ in each)

        def __iter__(self) -> Iterator[Any]:
            return iter([(item, i, end) for i, (item, end) in enumerate(each)])

        def close(self) -> None:
            pass

    monkeypatch.setattr(records, "Feeding", Fed)
    tasks = [Task(i + 1, params=params or SamplingParams()) for i in range(1 + max(item for item, _ in each))]
    model: Any = SimpleNamespace(config=SimpleNamespace(max_num_seqs=ROWS))
    return answered(model, tasks)


def test_failures_are_counted_from_the_last_answer_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the batch has rows, and as many again after an answer."""
    ends = [ROUND, ROUND, completion(), ROUND, ROUND, completion()]
    found = list(answers(monkeypatch, ends))
    assert [each.error for each in found] == ["RoundFailedError: device"] * 2 + [""] + [
        "RoundFailedError: device"
    ] * 2 + [""]


def test_one_more_failure_than_rows_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answers(monkeypatch, [completion(), ROUND, ROUND, ROUND, completion()])
    assert [next(found).error for _ in range(3)] == ["", *["RoundFailedError: device"] * 2]
    with pytest.raises(RoundFailedError):
        next(found)


def test_rows_that_fail_by_themselves_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(answers(monkeypatch, [REQUEST, REFUSED, REQUEST, REFUSED, REQUEST, ROUND, ROUND]))
    assert len(found) == 7 and found[1].error == "InvalidInputError: bad"


def test_samples_are_in_order_and_a_failed_one_fails_its_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = completion("a", sample_index=0), completion("b", sample_index=1)
    ends = [(0, second), (1, first), (1, REQUEST), (1, REQUEST), (0, first)]
    found = list(answers(monkeypatch, ends, SamplingParams(temperature=1.0, n=2)))
    assert [(each.task.number, [c.text for c in each.completions], each.error) for each in found] == [
        (2, [], "RequestFailedError: own"),
        (1, ["a", "b"], ""),
    ]
