"""The file of answers, which a run that was killed goes on with.

OUT                   a line for each row that has ended, in order of their ends
OUT.settings.json     what the answers depend on
.OUT.lock             held by the one process that may write
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.errors import InvalidInputError
from specdec.extensions.batches.records import Record, row_number
from specdec.run_files import KeptLines


class Output(KeptLines):
    """The answers of one run.

    Attributes:
        done: for each line of the input, 1 where its row has ended. failed: errors among them.
    """

    remedy = "give another file"
    lost = "its row is asked again"

    def __init__(self, path: Path, settings: Mapping[str, Any], lines: int) -> None:
        """lines: of the input, those that are blank among them.

        Raises:
            InvalidInputError: another process has the file, it was made with other settings or by something else, or
                it is damaged.
            OutputError: it cannot be written.
        """
        self.done, self.failed = bytearray(lines + 1), 0
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

    def _check_settings(self, kept: Path, settings: Mapping[str, Any]) -> None:
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
                f"{place}: no answer of this batch ({type(error).__name__}: {error}); remove the line, or {self.remedy}"
            ) from error
