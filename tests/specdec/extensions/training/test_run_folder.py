"""A run's folder: one process at a time, one run only, and fingerprints that see every weight."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import tiny_llama
from rich.console import Console

from specdec.errors import InvalidInputError, OutputError, RunFolderError
from specdec.extensions.training.run_folder import (
    AnswerLimits,
    AnswerStore,
    Questions,
    Setting,
    answer_prepared,
    claim,
    locked,
)
from specdec.run_files import check_writable
from specdec.user_warnings import SpecdecWarning
from specdec.wrapped.fingerprint import target_fingerprint, weights_fingerprint

SETTINGS = {"data": Setting("1a", "a.jsonl"), "aux_layers": Setting((1, 2)), "steps": Setting(4)}


def test_only_what_differs_is_shown(tmp_path: Path) -> None:
    claim(tmp_path, SETTINGS, [])
    claim(tmp_path, {**SETTINGS, "data": Setting("1a", "renamed.jsonl")}, [])
    with pytest.raises(InvalidInputError) as caught:
        claim(tmp_path, {**SETTINGS, "data": Setting("2b", "b.jsonl"), "seed": Setting(0)}, [])
    message = str(caught.value)
    assert "data: a.jsonl (1a) -> b.jsonl (2b)" in message and "seed: null -> 0" in message
    assert "aux_layers" not in message and "steps" not in message
    with pytest.raises(InvalidInputError, match="steps: 4 -> null"):
        claim(tmp_path, {"data": SETTINGS["data"], "aux_layers": SETTINGS["aux_layers"]}, [])


@pytest.mark.parametrize("content", ["", "[]", "{", "null", '{"format": 1}', '{"format": 1, "settings": {"a": 3}}'])
def test_a_damaged_record_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunFolderError, match=r"run\.json is damaged.*--overwrite"):
        claim(tmp_path, SETTINGS, [])


def test_a_record_of_another_format_is_refused(tmp_path: Path) -> None:
    claim(tmp_path, SETTINGS, [])
    record = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**record, "format": 2}))
    with pytest.raises(RunFolderError, match="format 2"):
        claim(tmp_path, SETTINGS, [])


def test_a_lock_keeps_other_processes_out_and_goes_with_its_process(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with locked(tmp_path):
            os.write(writer, b"!")
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGKILL)  # no clean-up of pytest's in the child
    try:
        os.read(reader, 1)
        with pytest.raises(RunFolderError, match=f"{tmp_path} is in use by another run"), locked(tmp_path):
            pass
        with AnswerStore(tmp_path / "answers.jsonl", "key"):
            pass
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    with locked(tmp_path), locked(tmp_path):
        pass


def test_answers_are_read_again_and_damaged_lines_left_out(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with AnswerStore(path, "key") as store:
        for index in (2, 0, 1, 3):
            store.add(f"q{index}", [index, 7])
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b"7", b"8")  # another token: still JSON
    path.write_bytes(b"\n".join([*lines[:3], b"[]", b"\xff{", lines[3][:-4]]))  # the last was being written
    for damaged, warned in ((3, pytest.warns(SpecdecWarning, match="cut off")), (0, nullcontext())):
        with warned, AnswerStore(path, "key") as store:
            assert store.answers == {"q2": [2, 7], "q1": [1, 7]} and store.damaged == damaged
    with AnswerStore(path, "another key") as store:
        assert store.answers == {} and store.damaged == 2


def asked(*prompts: list[int], digest: str, key: str = "k" * 16) -> Questions:
    return Questions(list(prompts), [8] * len(prompts), digest, key, AnswerLimits(8, 64))


def test_answers_are_kept_by_question_and_not_by_file(tmp_path: Path) -> None:
    """Another file of questions, with one before the others and one twice, asks for the new one alone, once."""
    told: list[list[int]] = []

    def generate_iter(prompts: list[list[int]], params: Any) -> Iterator[tuple[int, Any]]:
        told.extend(prompts)
        yield from ((i, SimpleNamespace(token_ids=[prompt[0], 9, 9])) for i, prompt in enumerate(prompts))

    model: Any = SimpleNamespace(generate_iter=generate_iter)
    console = Console(file=io.StringIO())
    first = answer_prepared(model, asked([1, 2], [3, 4], digest="a"), tmp_path, console)
    assert told == [[1, 2], [3, 4]] and first.sequence(1).tolist() == [3, 4, 3, 9, 9]
    told.clear()
    second = answer_prepared(model, asked([5, 6], [3, 4], [5, 6], digest="b"), tmp_path, console)
    assert told == [[5, 6]]
    assert [second.sequence(i).tolist()[2:] for i in range(3)] == [[5, 9, 9], [3, 9, 9], [5, 9, 9]]
    told.clear()
    answer_prepared(model, asked([3, 4], digest="a", key="x" * 16), tmp_path, console)  # another target
    assert told == [[3, 4]]


def test_folders_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_writable(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    with pytest.raises(OutputError, match=r"cannot write .*file/run: Not a directory"):
        check_writable(tmp_path / "file" / "run")
    with pytest.raises(OutputError, match="cannot write"), locked(tmp_path / "file" / "run"):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_fingerprint_sees_every_bit(dtype: torch.dtype) -> None:
    """One element changed by one unit in the last place, another name, another dtype."""
    plain = torch.nn.Linear(50, 7).to(dtype)
    before = weights_fingerprint(plain)
    assert weights_fingerprint(plain) == before
    with torch.no_grad():
        old = plain.weight[3, 17].clone()
        plain.weight[3, 17] = torch.nextafter(old, old + 1)
        assert weights_fingerprint(plain) != before
        plain.weight[3, 17] = old
    assert weights_fingerprint(plain) == before
    assert weights_fingerprint(torch.nn.ModuleDict({"other": plain})) != before
    assert weights_fingerprint(plain.to(torch.float16)) != before


def test_a_targets_fingerprint_is_about_what_it_computes() -> None:
    model, same = tiny_llama(), tiny_llama()
    same.config.name_or_path = "elsewhere"
    before = target_fingerprint(model)
    assert target_fingerprint(same) == before
    same.generation_config.eos_token_id = 5
    assert target_fingerprint(same) != before
    model.config.rms_norm_eps = 0.5
    assert target_fingerprint(model) != before
