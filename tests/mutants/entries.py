"""The committed list of mutants: single edits of the library, each with the tests that must fail on it."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
LIST = Path(__file__).with_name("mutants.toml")
PLACES = ("quick", "test")
"""Where a mutant is killed: by tests marked neither slow nor long, or by those that are not marked long."""
_REQUIRED = {"id", "file", "old", "new", "does"}
_ALLOWED = _REQUIRED | {"tests", "killed", "equivalent"}


class WrongEntryError(ValueError):
    """An entry of the list that cannot be run as it stands."""


@dataclass(frozen=True)
class Mutant:
    """One edit.

    Attributes:
        id: its name. file: relative to the repository's root.
        old, new: `old` stands once in the file and is replaced by `new`.
        does: the defect, in a few words.
        tests: files, or tests by their names in pytest, of which at least one must fail.
        killed: "quick" or "test", see `PLACES`; None for an equivalent one, or where it is not known yet.
        equivalent: why no test can see it; None of all others.
    """

    id: str
    file: str
    old: str
    new: str
    does: str
    tests: tuple[str, ...] = ()
    killed: str | None = None
    equivalent: str | None = None

    def source(self) -> str:
        """The file with the edit.

        Raises:
            WrongEntryError: the old text is not found exactly once.
        """
        if not (ROOT / self.file).is_file():
            raise WrongEntryError(f"{self.id}: there is no file {self.file}; name the file that has the old text now")
        text = _text_of(self.file)
        found = text.count(self.old)
        if found != 1:
            raise WrongEntryError(
                f"{self.id}: the old text is found {found} times in {self.file}, it must be found once; give the text "
                f"as it is now, with enough of its surroundings:\n{self.old}"
            )
        return text.replace(self.old, self.new)

    def check_syntax(self) -> None:
        """Raise WrongEntryError where the file with the edit is no Python: no test would be needed to see that."""
        try:
            ast.parse(self.source())
        except SyntaxError as error:
            raise WrongEntryError(f"{self.id}: {self.file} with the edit is no Python: {error}") from error

    def check(self) -> None:
        """Raise WrongEntryError for an entry that cannot be run, or that does not say what becomes of it."""
        self.source()
        if self.old == self.new:
            raise WrongEntryError(f"{self.id}: old and new text are the same")
        if self.killed not in (None, *PLACES):
            raise WrongEntryError(f"{self.id}: killed={self.killed!r}; allowed are {', '.join(PLACES)}")
        if self.killed is not None and self.equivalent is not None:
            raise WrongEntryError(f"{self.id}: both killed and equivalent; give one of them")
        if not self.tests:
            raise WrongEntryError(f"{self.id}: no tests; name the narrowest file that fails")
        missing = [name for name in self.tests if not (ROOT / name.partition("::")[0]).is_file()]
        if missing:
            raise WrongEntryError(f"{self.id}: there are no tests {', '.join(missing)}")


@cache
def _text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def read(path: Path = LIST) -> list[Mutant]:
    """All entries of a list, each of them checked.

    Raises:
        WrongEntryError: an entry cannot be run, or two have the same id.
    """
    found = [_mutant(given) for given in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]]
    twice = [name for name, count in Counter(mutant.id for mutant in found).items() if count > 1]
    if twice:
        raise WrongEntryError(f"two entries have the id {', '.join(twice)}; each needs its own")
    for mutant in found:
        mutant.check()
    return found


def _mutant(given: dict[str, Any]) -> Mutant:
    wrong = sorted((_REQUIRED - given.keys()) | (given.keys() - _ALLOWED))
    if wrong:
        raise WrongEntryError(f"{given.get('id', given)}: missing or unknown: {', '.join(wrong)}")
    return Mutant(**{**given, "tests": tuple(given.get("tests", ()))})
