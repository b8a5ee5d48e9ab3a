"""A batch from one file to another: every row once, whatever stands in it and whenever it was killed."""

from __future__ import annotations

import io
import itertools
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from drafters.training import lines_of_progress
from specdec.errors import InvalidInputError, OutputError, RoundFailedError
from specdec.extensions.batches.lines import Line, lines_of
from specdec.extensions.batches.records import Record, records
from specdec.extensions.batches.run_batch import Records, Summary, run_batch
from specdec.extensions.batches.tasks import TaskDefaults
from specdec.requests.sampling import SamplingParams
from tests import fakes
from tests.specdec.extensions.batches.made import echoed, read, write


class Killed(BaseException):
    """In place of a signal."""


def killed_after(count: int, inner: Records = echoed) -> Callable[[], Records]:
    """Answers that end with a kill after so many."""

    def some(lines: Iterable[Line]) -> Iterator[Record]:
        yield from itertools.islice(inner(lines), count)
        raise Killed

    return lambda: some


def run(source: Path, target: Path, start: Callable[[], Records] = lambda: echoed, **more: Any) -> Summary:
    return run_batch(source, target, {"model": "m", **more}, start, Console(file=io.StringIO()))


def lines_answered(target: Path) -> list[int]:
    return sorted(
        each["line"] if "line" in each else int(each["id"].removeprefix("batch_req_")) for each in read(target)
    )


def test_every_row_once_and_a_summary(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "a"}, b"\n", b"bad\r\n", {"id": 1, "prompt": "b"})
    summary = run(source, tmp_path / "out.jsonl")
    assert lines_answered(tmp_path / "out.jsonl") == [1, 3, 4]
    assert (summary.rows, summary.ended, summary.failed, summary.new_tokens) == (3, 3, 1, 6)
    assert summary.words.startswith("3 of 3 rows have ended, 1 with an error; 6 new tokens in ")
    again = run(source, tmp_path / "out.jsonl", start=lambda: pytest.fail("nothing is left to do"))
    assert again.words == "3 of 3 rows have ended (3 in earlier runs), 1 with an error"


def test_a_row_that_was_removed_is_asked_again(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "a"}, b"bad\n")
    target = tmp_path / "out.jsonl"
    run(source, target)
    target.write_bytes(b"".join(line for line in target.read_bytes().splitlines(True) if b"not JSON" not in line))
    assert run(source, target).ended == 1 and lines_answered(target) == [1, 2]


def test_other_inputs_and_settings_are_refused(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b"}), tmp_path / "out.jsonl"
    with pytest.raises(Killed):
        run(source, target, killed_after(1))
    with pytest.raises(InvalidInputError, match=r"temperature: null -> 1\.0"):
        run(source, target, temperature=1.0)
    write(source, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    with pytest.raises(InvalidInputError, match=r"rows: 2 -> 3; input.sha256: .* restore it to go on, or give another"):
        run(source, target)


def test_the_input_is_no_output(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", {"prompt": "a"})
    (tmp_path / "link.jsonl").symlink_to(source)
    for target in (source, tmp_path / "link.jsonl"):
        with pytest.raises(InvalidInputError, match="is both the input and the output"):
            run(source, target)
    assert read(source) == [{"prompt": "a"}]


def test_a_full_disk_ends_the_run_which_goes_on_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec import run_files

    source, target = write(tmp_path / "in.jsonl", *({"prompt": "a"} for _ in range(5))), tmp_path / "out.jsonl"
    plain, left = run_files.write_whole, [3]

    def full(file: Any, data: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        plain(file, data)

    monkeypatch.setattr(run_files, "write_whole", full)
    with pytest.raises(OutputError, match="the same command goes on from there"):
        run(source, target)
    assert lines_answered(target) == [1, 2, 3]
    left[0] = 9
    assert run(source, target).ended == 2 and lines_answered(target) == [1, 2, 3, 4, 5]


def test_progress_is_a_line_now_and_then_where_there_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_of_progress, "LINE_S", 0.01)
    source, shown = write(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b"}), io.StringIO()

    def slowly(lines: Iterable[Line]) -> Iterator[Record]:
        for record in echoed(lines):
            yield record
            time.sleep(0.1)

    run_batch(source, tmp_path / "out.jsonl", {}, lambda: slowly, Console(file=shown, width=100))
    lines = shown.getvalue().splitlines()
    assert any("1/2" in line and "tokens/s, 0 errors" in line for line in lines) and "2/2" in lines[-1]


def test_a_summary_counts_earlier_runs() -> None:
    summary = Summary(100, before=10, ended=30, new_tokens=600, rounds=200, emitted=400, seconds=120.0)
    assert summary.rate == 5.0
    assert summary.words.startswith(
        "40 of 100 rows have ended (10 in earlier runs), 0 with an error; 600 new tokens in 120"
    )


def test_a_bar_on_a_terminal_has_tokens_a_second(tmp_path: Path) -> None:
    source, shown = write(tmp_path / "in.jsonl", {"prompt": "a"}, b"bad\n"), io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120)
    run_batch(source, tmp_path / "out.jsonl", {}, lambda: echoed, console)
    assert "2/2" in shown.getvalue() and "tokens/s, 1 errors" in shown.getvalue()


def as_json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


VALUES = st.none() | st.text() | st.integers() | st.lists(st.integers())
FIELDS = st.dictionaries(st.sampled_from(["prompt", "stop", "seed", "metadata"]), VALUES, max_size=4)
BODIES = st.none() | st.text() | st.dictionaries(st.text(), st.text())
ROWS = st.one_of(
    st.builds(as_json, prompt=st.just("a"), temperature=st.floats(0, 2)),
    FIELDS.map(lambda fields: as_json(**fields)),
    st.builds(as_json, custom_id=st.just("x"), url=st.just("/v1/completions"), body=BODIES),
    st.binary(max_size=40),
    st.sampled_from([b"", b"  ", b"{}", b"[]", b"null", b"\xef\xbb\xbf{}", b'{"line": 1, "error": null}']),
    st.just(b'{"prompt": "\\ud800"}'),
)


@pytest.mark.slow
@given(
    st.lists(ROWS, max_size=8), st.sampled_from([b"\n", b"\r\n"]), st.lists(st.integers(0, 5), max_size=3), st.data()
)
@settings(deadline=None)
@pytest.mark.thorough
def test_any_file_however_often_it_is_killed(
    tmp_path_factory: pytest.TempPathFactory, rows: list[bytes], end: bytes, kills: list[int], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("run")
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    source.write_bytes(end.join(rows))
    warnings.simplefilter("ignore")
    try:
        run(source, folder / "right.jsonl")
    except InvalidInputError as error:
        assert any(words in str(error) for words in ("no rows", "UTF-16", "have the same", "gzip", "JSON array"))
        return
    for count in kills:
        with suppress(Killed):
            run(source, target, killed_after(count))
        size = target.stat().st_size
        os.truncate(target, data.draw(st.integers(max(0, size - 60), size)))
    run(source, target)
    assert by_line(target) == by_line(folder / "right.jsonl")
    assert lines_answered(target) == [line.number for line in lines_of(source)]


@pytest.fixture(scope="module")
def model() -> Any:
    return fakes.wrap(fakes.tiny_llama(), "lookup", max_num_batched_tokens=40)


def of_model(model: Any) -> Records:
    asking = TaskDefaults(SamplingParams(max_new_tokens=4), seed=7)
    return lambda lines: records(model, lines, asking)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Forty rows, greedy and sampled, of which some cannot be answered."""
    rows: list[Any] = [{"id": i, "prompt": "abcab"[: 1 + i % 5], "temperature": i % 3 / 2} for i in range(40)]
    rows[5], rows[6] = {"id": 5, "prompt": "a" * 500}, b"bad\n"
    rows[7] = {"id": 7, "token_ids": [1, 999]}
    rows[8] = {"custom_id": "8", "url": "/v1/completions", "body": {"prompt": "ab", "n": 3, "temperature": 1.0}}
    rows[9] = {"id": 9, "messages": [{"role": "user", "content": "a"}]}  # there is no template
    return write(tmp_path / "in.jsonl", *rows)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_model_says_the_same_however_often_it_is_killed(model: Any, questions: Path, tmp_path: Path) -> None:
    right = run(questions, tmp_path / "right.jsonl", lambda: of_model(model))
    assert (right.rows, right.failed) == (40, 4)
    errors = {each["line"]: each["error"] for each in read(tmp_path / "right.jsonl") if each["error"]}
    assert sorted(errors) == [6, 7, 8, 10] and "InvalidInputError: the prompt has 500 tokens" in errors[6]
    for count in (3, 0, 11):
        with pytest.raises(Killed):
            run(questions, tmp_path / "out.jsonl", killed_after(count, of_model(model)))
        assert fakes.free_everywhere(model)
    run(questions, tmp_path / "out.jsonl", lambda: of_model(model))
    assert by_line(tmp_path / "out.jsonl") == by_line(tmp_path / "right.jsonl")
    greedy = next(each for each in read(tmp_path / "out.jsonl") if each.get("id") == 3)
    assert greedy["token_ids"] == fakes.hf_greedy([0, 1, 2, 0], 4)


def by_line(path: Path) -> list[str]:
    found = read(path)
    for each in found:
        each.get("response", {}).get("body", {}).pop("created", None)
    return sorted(map(json.dumps, found))


class Decoding(fakes.LetterTokenizer):
    """Raises as it decodes what begins with one of the letters."""

    bad = ""

    def decode(self, token_ids: list[int], **options: Any) -> str:
        text = super().decode(token_ids, **options)
        if text and text[0] in self.bad:
            raise ValueError("planted")
        return text


@pytest.mark.slow
def test_a_request_that_fails_is_a_row_with_an_error(tmp_path: Path) -> None:
    tokenizer = Decoding()
    model = fakes.wrap(fakes.tiny_llama(), tokenizer=tokenizer)
    first = [fakes.LETTERS[fakes.hf_greedy([i], 1)[0]] for i in range(8)]
    tokenizer.bad = first[2]
    source = write(tmp_path / "in.jsonl", *({"token_ids": [i]} for i in range(8)))
    run(source, tmp_path / "out.jsonl", lambda: of_model(model))
    failed = {each["line"] - 1 for each in read(tmp_path / "out.jsonl") if each["error"]}
    assert failed == {i for i in range(8) if first[i] == first[2]}


@pytest.mark.slow
def test_rounds_that_fail_one_after_the_other_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fakes.wrap(fakes.tiny_llama(), enable_prefix_caching=False)

    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(model.hf_model.lm_head, "forward", broken)
    source = write(tmp_path / "in.jsonl", *({"token_ids": [i]} for i in range(30)))
    with pytest.raises(RoundFailedError):
        run(source, tmp_path / "out.jsonl", lambda: of_model(model))
    assert len(read(tmp_path / "out.jsonl")) == 3  # as many as the batch has rows
