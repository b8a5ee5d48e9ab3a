"""The lines of an input file, read one at a time, a digest of it, and the keys of its rows."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from specdec.errors import InvalidInputError
from specdec.values import Json, is_whole, short, wrong

MOST_BYTES = 64 * 2**20
"""Of a line; the rest of a longer one is skipped, and its row is an error."""
KEYS = ("custom_id", "id", "key")
"""Fields that may hold a row's key, the first of them that is there."""
_BOM = b"\xef\xbb\xbf"
_NO_LINES = {
    b"\xff\xfe": "is in UTF-16; save it as UTF-8",
    b"\xfe\xff": "is in UTF-16; save it as UTF-8",
    b"\x1f\x8b": "is compressed by gzip; unpack it first: gunzip --keep FILE",
    b"[": "begins with a JSON array; give one JSON object a line: jq -c '.[]' FILE > lines.jsonl",
}
"""Beginnings of files that are no batch, and what to do."""


class Line(NamedTuple):
    """A line that is not blank: its number, from 1, and its bytes, of a line that is too long MOST_BYTES + 1."""

    number: int
    data: bytes


@dataclass(frozen=True)
class InputFacts:
    """The input of a run. lines: the number of the last line. rows: lines that are not blank."""

    sha256: str
    lines: int
    rows: int


def lines_of(path: Path, seen: Callable[[bytes], object] = len) -> Iterator[Line]:
    """The lines that are not blank. seen: given all bytes of the file, in order.

    Raises:
        InvalidInputError: the file cannot be read, is in UTF-16 or compressed, or is a JSON array.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while data := file.readline(MOST_BYTES + 1):
                number += 1
                seen(data)
                begin = data.removeprefix(_BOM).lstrip()[:2] if number == 1 else b""
                if wrong := [why for start, why in _NO_LINES.items() if begin.startswith(start)]:
                    raise InvalidInputError(f"{path} {wrong[0].replace('FILE', path.name)}")
                ended = data.endswith(b"\n") or len(data) <= MOST_BYTES
                while not ended and (more := file.readline(2**20)):
                    seen(more)
                    ended = more.endswith(b"\n")
                data = data.removeprefix(_BOM) if number == 1 else data
                if not data.isspace() and data:
                    yield Line(number, data)
    except OSError as error:
        raise InvalidInputError(f"cannot read {path}: {error.strerror or error}") from error


def fields_of(line: Line) -> Json:
    """The JSON object of a line.

    Raises:
        InvalidInputError: it is too long, not UTF-8, not JSON, no object, or has a field twice.
    """
    if len(line.data) > MOST_BYTES:
        raise InvalidInputError(f"the line is longer than {MOST_BYTES // 2**20} MiB")
    try:
        found = json.loads(line.data.decode(), parse_constant=_no_constant, object_pairs_hook=_once)
    except InvalidInputError:
        raise
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInputError(f"a row is a JSON object, not {short(found)}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> Json:
    """A JSON object. Raises InvalidInputError: it has a field twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise InvalidInputError(f"the field {short(twice)} is there twice; leave one of them")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


class Key(NamedTuple):
    """A row's key: the field that holds it, and its value."""

    field: str
    value: str | int

    @property
    def name(self) -> str:
        """The same for 5 and "5", which nobody could tell apart in a table."""
        return str(self.value)


def key_of(fields: Json) -> Key | None:
    """The key of a row; None where it has none.

    Raises:
        InvalidInputError: it is neither a text nor a whole number.
    """
    field = next((name for name in KEYS if fields.get(name) is not None), None)
    if field is None:
        return None
    value = fields[field]
    if not isinstance(value, str) and not is_whole(value):
        raise wrong(field, value, "a key is a text or a whole number")
    return Key(field, value)


def digest(*parts: object) -> int:
    """64 bits of some texts and numbers; also the seed of a row: `digest(seed of the run, key)`."""
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def look_through(path: Path) -> InputFacts:
    """Read the file once, keeping eight bytes of each key.

    Raises:
        InvalidInputError: it is no file that can be read twice, has no rows, or two rows have one key.
    """
    if path.exists() and not path.is_file():
        raise InvalidInputError(f"{path} is no file; a batch is read from a file, which a run that goes on reads again")
    sha = hashlib.sha256()
    digests = array("Q")
    rows = 0
    lines = 0
    for line in lines_of(path, sha.update):
        rows += 1
        lines = line.number
        if (key := _known_key(line)) is not None:
            digests.append(digest(key.name))
    if not rows:
        raise InvalidInputError(f"{path} has no rows; give one JSON object a line")
    ordered = np.sort(np.frombuffer(digests, np.uint64))
    twice = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if twice:
        _check_twice(path, twice)
    return InputFacts(sha.hexdigest(), lines, rows)


def _known_key(line: Line) -> Key | None:
    """None also for a row that is an error: its line has the error."""
    try:
        return key_of(fields_of(line))
    except InvalidInputError:
        return None


def _check_twice(path: Path, twice: set[int]) -> None:
    """Raises InvalidInputError: keys with these digests are indeed the same."""
    first: dict[str, int] = {}
    for line in lines_of(path):
        key = _known_key(line)
        if key is None or digest(key.name) not in twice:
            continue
        if key.name in first:
            raise InvalidInputError(
                f"{path}: lines {first[key.name]} and {line.number} have the same {key.field}, {short(key.value)}; "
                "answers are found by it: make keys different, or leave them out"
            )
        first[key.name] = line.number
