"""Answering: tasks -> answers of a model, as they end, with a batch that stays full."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from specdec.engine.feeding import Feeding
from specdec.engine.streams import Stream
from specdec.errors import InvalidInputError, RequestFailedError, SpecdecError
from specdec.extensions.batches.lines import Line
from specdec.extensions.batches.records import Record, record_of
from specdec.extensions.batches.tasks import Task, TaskDefaults, task_of
from specdec.requests.request import Completion
from specdec.requests.submission import filled

if TYPE_CHECKING:
    from specdec.model import SpeculativeModel


class TaskResult(NamedTuple):
    """A task that has ended: its completions, in order, or an error, with the name of its class."""

    task: Task
    completions: tuple[Completion, ...] = ()
    error: str = ""


class _Refused(InvalidInputError):
    """A task that cannot run; the message is its error."""


def answered(model: SpeculativeModel, tasks: Iterable[Task]) -> Iterator[TaskResult]:
    """Every task once, in order of their ends; read lazily, see `Feeding`. One that fails is an answer with an error.

    Raises:
        SpecdecError: more rounds in a row failed than the batch has rows, without an answer between: the device, most
            likely, and not a row. Others: the model is closed or has changed.
    """
    held: dict[int, Task] = {}
    rows = model.config.max_num_seqs

    def numbered() -> Iterator[Task]:
        for number, task in enumerate(tasks):
            held[number] = task
            yield task

    def opened(group: list[Task]) -> Stream:
        if refused := [task.error for task in group if task.error]:
            raise _Refused(refused[0])
        return model.stream([task.prompt for task in group], [filled(task.params, model) for task in group])

    samples: dict[int, list[Completion]] = defaultdict(list)
    failures = 0
    with closing(Feeding(opened, numbered(), rows)) as feeding:
        for item, _, found in feeding:
            if isinstance(found, Completion):
                failures = 0
                samples[item].append(found)
                if item in held and len(samples[item]) == held[item].params.n:
                    done = sorted(samples.pop(item), key=lambda one: one.sample_index)
                    yield TaskResult(held.pop(item), tuple(done))
            elif item in held:  # of several samples that fail the first is told
                failures += not isinstance(found, (InvalidInputError, RequestFailedError))
                if failures > rows:
                    raise found
                samples.pop(item, None)
                yield TaskResult(held.pop(item), error=error_text(found))
            if item not in held:
                samples.pop(item, None)


def error_text(error: SpecdecError) -> str:
    """An error as answers record it."""
    return str(error) if isinstance(error, _Refused) else f"{type(error).__name__}: {error}"


def records(model: SpeculativeModel, lines: Iterable[Line], asking: TaskDefaults) -> Iterator[Record]:
    """The records of some lines, as they end."""
    for task, completions, error in answered(model, (task_of(line, asking) for line in lines)):
        yield record_of(task, completions, error, model.tokenizer)
