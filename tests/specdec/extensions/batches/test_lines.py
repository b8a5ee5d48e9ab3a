"""Lines of an input file, however it was made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specdec.errors import InvalidInputError
from specdec.extensions.batches import lines
from specdec.extensions.batches.lines import Line, digest, fields_of, key_of, lines_of, look_through

ROW = b'{"prompt": "a"}'


def found(path: Path, data: bytes) -> list[tuple[int, bytes]]:
    path.write_bytes(data)
    return [(line.number, line.data.strip()) for line in lines_of(path)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (ROW, [(1, ROW)]),
        (ROW + b"\n\n  \t\r\n" + ROW + b"\r\n", [(1, ROW), (4, ROW)]),
        (b"\xef\xbb\xbf" + ROW + b"\n", [(1, ROW)]),
        (b"\xef\xbb\xbf\n" + ROW, [(2, ROW)]),
        (b"", []),
        (b"\n\n", []),
        (b"\x00\n" + ROW, [(1, b"\x00"), (2, ROW)]),
        (ROW + b"\n[\n\x1f\x8b", [(1, ROW), (2, b"["), (3, b"\x1f\x8b")]),  # the first line alone tells a file's kind
    ],
)
def test_lines_are_numbered_as_editors_do(tmp_path: Path, data: bytes, expected: list[tuple[int, bytes]]) -> None:
    assert found(tmp_path / "in.jsonl", data) == expected


def test_the_rest_of_a_long_line_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_BYTES", 40)
    long = b'{"prompt": "' + b"x" * 3_000_000 + b'"}'
    (first, kept), second = found(tmp_path / "in.jsonl", long + b"\n" + ROW)
    assert (first, len(kept), second) == (1, 41, (2, ROW))
    with pytest.raises(InvalidInputError, match="the line is longer than"):
        fields_of(Line(1, kept))
    facts = look_through(tmp_path / "in.jsonl")
    assert (facts.rows, facts.lines) == (2, 2)
    (tmp_path / "in.jsonl").write_bytes(long[:-5] + b'abc"}\n' + ROW)
    assert look_through(tmp_path / "in.jsonl").sha256 != facts.sha256  # what is skipped counts, too


def test_a_line_of_ten_megabytes_is_read(tmp_path: Path) -> None:
    ((_, line),) = found(tmp_path / "in.jsonl", b'{"prompt": "' + b"x" * 10_000_000 + b'"}\n')
    assert len(fields_of(Line(1, line))["prompt"]) == 10_000_000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"prompt": "a', "not JSON: Unterminated string"),
        (b'{"prompt": "\xff"}', "not UTF-8: invalid start byte at byte 12"),
        (b'["a"]', r"a row is a JSON object, not \['a'\]"),
        (b"7", "a row is a JSON object, not 7"),
        (b'{"temperature": NaN}', "not JSON: NaN is no JSON value"),
        (b"[" * 100_000, "not JSON: "),
        (b'{"seed": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit"),
        (ROW + ROW, "not JSON: Extra data"),
        (b'{"prompt": "a", "n": 1, "prompt": "b"}', "^the field 'prompt' is there twice; leave one of them"),
        (b'{"metadata": {"a": 1, "a": 1}}', "the field 'a' is there twice"),
    ],
)
def test_what_is_no_row_is_named(data: bytes, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        fields_of(Line(1, data))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has no rows; give one JSON object a line"),
        (b"\xff\xfe{\x00}\x00", "is in UTF-16; save it as UTF-8"),
        (b"\x1f\x8b\x08\x00", r"compressed by gzip; unpack it first: gunzip --keep in\.jsonl"),
        (b'\xef\xbb\xbf [\n {"prompt": "a"}]', "begins with a JSON array; give one JSON object a line: jq -c"),
        (b'{"id": 5}\n\n{"id": "5"}\n', "lines 1 and 3 have the same id, '5'"),
        (b'{"custom_id": "a", "id": 1}\n{"key": "b"}\nbad\n{"key": "a"}', "lines 1 and 4 have the same key, 'a'"),
    ],
)
def test_a_file_that_cannot_be_a_batch_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "in.jsonl").write_bytes(data)
    with pytest.raises(InvalidInputError, match=message):
        look_through(tmp_path / "in.jsonl")


def test_keys_of_which_only_the_digests_are_equal_are_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "digest", lambda key: 7)
    (tmp_path / "in.jsonl").write_bytes(b'{"id": 1}\n{"id": 2}\n')
    assert look_through(tmp_path / "in.jsonl").rows == 2


def test_a_digest_is_of_its_parts() -> None:
    """Seeds 1 and 11 of runs draw otherwise for every key."""
    assert len({digest(1, "1 key"), digest(11, " key"), digest("11 key"), digest(1, "1", " key")}) == 4
    assert digest(1, "a") == digest("1", "a")


def test_a_file_that_is_not_there_and_a_pipe(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"cannot read .*: No such file"):
        look_through(tmp_path / "none.jsonl")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidInputError, match="is no file; a batch is read from a file"):
        look_through(tmp_path / "pipe")


@pytest.mark.parametrize("value", [1.5, True, ["a"], {}])
def test_a_key_is_a_text_or_a_whole_number(value: object) -> None:
    with pytest.raises(InvalidInputError, match="a key is a text or a whole number"):
        key_of({"id": value})


def test_keys_that_are_null_are_none() -> None:
    assert key_of({"custom_id": None, "prompt": "a"}) is None
    assert key_of({"custom_id": None, "key": 0}) == ("key", 0)
