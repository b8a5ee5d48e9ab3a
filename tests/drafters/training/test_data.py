"""Questions, answers and batches: nothing is lost, nothing is counted twice, and a step's batch depends on the step."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention.errors import InvalidInputError
from drafters.training.data import AnswerSet, answer_set, read_questions
from drafters.training.objective import collate, epoch_order, held_out_batches, training_batches
from drafters.training.state import TrainConfig

CPU = torch.device("cpu")


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_questions_of_all_three_kinds(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One plus one?"}]
    file = write(
        tmp_path / "q.jsonl",
        {"messages": [*chat, {"role": "assistant", "content": "Two."}]},
        {"prompt": "Hello", "id": 4},
        "",
        {"question": "Why?", "answer": "Because."},
    )
    assert read_questions(file) == [chat, *([{"role": "user", "content": text}] for text in ("Hello", "Why?"))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ({"text": "x"}, "messages, prompt, question"),
        ([1], "messages, prompt, question"),
        ({"prompt": " "}, "no user's turn"),
        ({"prompt": 3}, "role and content"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no user's turn"),
        ({"messages": [{"role": "user"}]}, "role and content"),
    ],
)
def test_broken_lines_are_named(line: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_questions(write(tmp_path / "q.jsonl", {"prompt": "fine"}, line))


def test_files_without_questions(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"cannot read questions from .*none\.jsonl"):
        read_questions(tmp_path / "none.jsonl")
    with pytest.raises(InvalidInputError, match="no questions"):
        read_questions(write(tmp_path / "q.jsonl", ""))
    (tmp_path / "q.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(InvalidInputError, match="UTF-8"):
        read_questions(tmp_path / "q.jsonl")


def answers_of(*lengths: tuple[int, int]) -> AnswerSet:
    """Sequences of (prompt, answer) lengths; sequence i consists of the numbers 100 i, 100 i + 1, …"""
    starts = [100 * i for i in range(len(lengths))]
    prompts = [list(range(s, s + p)) for s, (p, _) in zip(starts, lengths, strict=True)]
    replies = [list(range(s + p, s + p + a)) for s, (p, a) in zip(starts, lengths, strict=True)]
    return answer_set(prompts, replies, max_length=12)


def test_answers_follow_their_prompts_and_long_ones_are_cut() -> None:
    answers = answers_of((2, 3), (11, 9), (1, 1), (4, 20))
    assert len(answers) == 2  # of the second one answer token would be left, the third has only one
    assert answers.sequence(0).tolist() == [0, 1, 2, 3, 4]
    assert answers.sequence(1).tolist() == list(range(300, 312))
    assert answers.answer_mask().tolist() == [False] * 2 + [True] * 3 + [False] * 4 + [True] * 8
    assert answers.token_counts(400).nonzero().flatten().tolist() == [2, 3, 4, *range(304, 312)]


def test_answer_errors() -> None:
    with pytest.raises(InvalidInputError, match="2 prompts got 1 answers"):
        answer_set([[1], [2]], [[1, 2]], 9)
    with pytest.raises(InvalidInputError, match="no answer has two tokens"):
        answer_set([[1]], [[1]], 9)
    with pytest.raises(InvalidInputError, match="1 to 1 can be held out"):
        answers_of((1, 2), (1, 2)).split(2, seed=0)


def test_answers_are_split() -> None:
    answers = answers_of(*((1, 2 + i) for i in range(9)))
    rest, held_out = answers.split(3, seed=1)
    firsts = [int(part.sequence(i)[0]) for part in (rest, held_out) for i in range(len(part))]
    assert (len(rest), len(held_out)) == (6, 3)
    assert sorted(firsts) == [100 * i for i in range(9)]


@given(st.integers(1, 90), st.integers(1, 7), st.integers(0, 3))
def test_an_epoch_holds_each_sequence_at_most_once(count: int, batch_size: int, epoch: int) -> None:
    lengths = np.random.default_rng(count).integers(2, 40, count)
    batches = epoch_order(lengths, batch_size, 7, epoch)
    used = np.concatenate(batches)
    assert len(set(used.tolist())) == len(used)
    if count < batch_size:
        assert len(used) == count
    else:
        assert {len(batch) for batch in batches} == {batch_size}
        assert len(used) == count // batch_size * batch_size


def test_epochs_differ_and_every_sequence_comes_at_some_time() -> None:
    lengths = np.arange(2, 12)
    epochs = [epoch_order(lengths, 4, 0, epoch) for epoch in range(12)]
    assert len({tuple(np.concatenate(epoch).tolist()) for epoch in epochs}) == 12
    assert {int(i) for epoch in epochs for batch in epoch for i in batch} == set(range(10))


def test_a_run_that_starts_later_gets_the_same_batches() -> None:
    answers = answers_of(*((1, 2 + i) for i in range(9)))
    whole = [b.token_ids for b in islice(training_batches(answers, 2, 4, 3, CPU), 12)]
    for first in (1, 4, 7):
        rest = islice(training_batches(answers, 2, 4, 3, CPU, first), 12 - first)
        assert all(torch.equal(a, b.token_ids) for a, b in zip(whole[first:], rest, strict=True))


def test_collate_pads_on_the_right() -> None:
    batch = collate(answers_of((2, 3), (1, 2)), np.array([1, 0]), 4, CPU)
    assert batch.token_ids.tolist() == [[100, 101, 102, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 0, 0, 0]]
    assert batch.real.sum(1).tolist() == [3, 5]
    assert batch.answer[0].nonzero().flatten().tolist() == [1, 2]
    assert batch.answer[1].nonzero().flatten().tolist() == [2, 3, 4]


def test_held_out_batches_hold_everything_once() -> None:
    answers = answers_of(*((1, 2 + i) for i in range(7)))
    firsts = [int(row[0]) for batch in held_out_batches(answers, 3, 4, CPU) for row in batch.token_ids]
    assert sorted(firsts) == [100 * i for i in range(7)]


@pytest.mark.parametrize(
    ("values", "message"),
    [({"steps": 0}, "steps"), ({"decay": 1.5}, "decay"), ({"beta2": 1.0}, "beta2"), ({"clip": -1.0}, "clip")],
)
def test_settings_that_no_run_can_use(values: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        TrainConfig(**values)  # type: ignore[arg-type]


def test_a_byte_order_mark_and_fields_that_are_null(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": null, "question": "a"}\n{"messages": null, "prompt": "b"}\n')
    assert [messages[0]["content"] for messages in read_questions(file)] == ["a", "b"]
