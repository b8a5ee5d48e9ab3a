"""Run a batch: rows of a file that have no answer yet -> answers added to another file, with a bar.

A run that was killed goes on with its files:

OUT                   a line for each row that has ended, in order of their ends
OUT.settings.json     what the answers depend on
.OUT.lock             held by the one process that may write
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from attention.errors import named_error
from drafters.training.lines_of_progress import LinesOfProgress
from specdec.errors import InvalidInputError
from specdec.extensions.batches.lines import Line, lines_of, look_through
from specdec.extensions.batches.records import Record, row_number
from specdec.requests.shown import tau_words
from specdec.run_files import KeptLines
from specdec.values import Json, ratio

Records = Callable[[Iterable[Line]], Iterator[Record]]
"""Lines -> their records, each once, in any order; lines are read only so far ahead as keeps the work going."""


@dataclass
class Summary:
    """How a run went.

    Attributes:
        rows: of the input. before: those that had ended in an earlier run. ended: in this one. failed: errors, of both.
        new_tokens, rounds, emitted: of this run; the tokens of rounds, which are those after each first one.
        seconds: of this run, without loading.
    """

    rows: int
    before: int = 0
    ended: int = 0
    failed: int = 0
    new_tokens: int = 0
    rounds: int = 0
    emitted: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """New tokens a second."""
        return self.new_tokens / max(self.seconds, 1e-9)

    @property
    def words(self) -> str:
        """In a line."""
        before = f" ({self.before:,} in earlier runs)" if self.before else ""
        tau = tau_words(ratio(self.emitted, self.rounds))
        speed = f"{self.new_tokens:,} new tokens in {self.seconds:.1f} s, {self.rate:,.0f}/s, {tau}"
        ended = f"{self.before + self.ended:,} of {self.rows:,} rows have ended{before}, {self.failed:,} with an error"
        return f"{ended}; {speed}" if self.ended else ended

    def count(self, record: Record) -> None:
        """Add a row of this run."""
        self.ended += 1
        self.failed += record.failed
        self.new_tokens += record.new_tokens
        self.rounds += record.rounds
        self.emitted += record.emitted


class Output(KeptLines):
    """The answers of one run.

    Attributes:
        done: for each line of the input, 1 where its row has ended. failed: errors among them.
    """

    remedy = "give another file"
    lost = "its row is asked again"

    def __init__(self, path: Path, settings: Json, lines: int) -> None:
        """lines: of the input, those that are blank among them.

        Raises:
            InvalidInputError: another process has the file, it was made with other settings or by something else, or
                it is damaged.
            OutputError: it cannot be written.
        """
        self.done = bytearray(lines + 1)
        self.failed = 0
        if path.exists() and not path.is_file():
            raise InvalidInputError(f"{path} is no file that answers can be added to")
        if not path.absolute().parent.is_dir():
            raise InvalidInputError(f"{path}: there is no folder {path.absolute().parent}")
        kept = path.with_name(f"{path.name}.settings.json")
        super().__init__(path, path.with_name(f".{path.name}.lock"), (kept, settings))

    def add(self, record: Record) -> None:
        """Write an answer, once for its row.

        Raises:
            OutputError: it cannot be written; those before stay.
        """
        if not self.done[record.number]:
            self.write(record.data)
            self.done[record.number] = 1
            self.failed += record.failed

    def _check_settings(self, kept: Path, settings: Json) -> None:
        if not self.path.exists() or not self.path.stat().st_size:  # an empty file binds nobody
            kept.unlink(missing_ok=True)
        elif not kept.is_file():
            raise InvalidInputError(f"{self.path} exists and is no batch's ({kept.name} is missing); {self.remedy}")
        super()._check_settings(kept, settings)

    def take(self, line: bytes, place: str) -> None:
        """Count a row that has ended before."""
        try:
            record = json.loads(line)
            number = row_number(record)
            self.failed += not self.done[number] and record["error"] is not None
            self.done[number] = 1
        except (ValueError, LookupError, TypeError) as error:
            raise InvalidInputError(
                f"{place}: no answer of this batch ({named_error(error)}); remove the line, or {self.remedy}"
            ) from error


def run_batch(
    source: Path,
    target: Path,
    settings: Json,
    start: Callable[[], Records],
    console: Console | None = None,
) -> Summary:
    """TaskResult every row of `source` that has no answer in `target`.

    Args:
        settings: what the answers depend on, beside the input. start: loads what answers; not called where nothing is
            left to do.

    Raises:
        InvalidInputError: the input cannot be read or has two rows of one key; see `Output`.
        OutputError: answers cannot be written; those before are kept. Others: of `start` and what it returns.
    """
    if target.exists() and source.exists() and target.samefile(source):
        raise InvalidInputError(f"{source} is both the input and the output; give another file for the answers")
    facts = look_through(source)
    about = {"sha256": facts.sha256, "rows": facts.rows}
    with Output(target, {**settings, "input": about}, facts.lines) as output:
        summary = Summary(facts.rows, before=sum(output.done), failed=output.failed)
        if summary.before < summary.rows:
            records = start()
            _answer(source, output, records, summary, console or Console(stderr=True))
    return summary


def _answer(source: Path, output: Output, records: Records, summary: Summary, console: Console) -> None:
    begin = time.monotonic()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    left = (line for line in lines_of(source) if not output.done[line.number])
    with LinesOfProgress(*columns, TimeRemainingColumn(), console=console) as bar:
        shown = bar.add_task("", total=summary.rows, completed=summary.before)
        for record in records(left):
            output.add(record)
            summary.count(record)
            summary.seconds = time.monotonic() - begin
            text = f"{summary.rate:,.0f} tokens/s, {summary.failed:,} errors"
            bar.update(shown, completed=summary.before + summary.ended, description=text)
