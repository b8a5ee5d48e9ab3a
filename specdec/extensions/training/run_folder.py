"""The folder of a training run: its lock, its record of settings, and the target's answers as they come."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from attention.errors import named_error
from drafters.training.data import AnswerSet, answer_set
from drafters.training.lines_of_progress import LinesOfProgress
from specdec import run_files
from specdec.errors import InvalidInputError, RunFolderError
from specdec.model import SpeculativeModel
from specdec.requests.prompts import encode_prompts
from specdec.requests.sampling import SamplingParams
from specdec.run_files import KeptLines, write_atomically, writing
from specdec.wrapped.fingerprint import target_fingerprint

FORMAT = 1
"""Of everything in a run folder; a folder of another format is refused."""
_RECORD = "run.json"


@dataclass(frozen=True)
class Setting:
    """One thing that decides a run's result.

    value: what is compared; JSON. name: shown to a person beside it, and not compared (a path, for example).
    """

    value: Any
    name: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.value})" if self.name else json.dumps(self.value)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make `folder` if it is missing, and keep other processes out of it while the block runs. Nested use is allowed.

    Raises:
        RunFolderError: another process holds the lock. OutputError: the folder cannot be written.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with run_files.locked(
        folder / ".run.lock", lambda why: RunFolderError(f"{folder} {why} name another folder"), nests=True
    ):
        yield


def claim(folder: Path, settings: Mapping[str, Setting], leftovers: list[Path]) -> None:
    """Record all that decides a run's result, or find that the folder holds a run made from just the same.

    leftovers: results in the folder; without a record nobody knows what they were made from.

    Raises:
        InvalidInputError: the folder holds a run made from something else, or results without a record.
        RunFolderError: the record is damaged. OutputError: it cannot be written.
    """
    path = folder / _RECORD
    if path.exists():
        old = _read(path)
        nothing = Setting(None)
        pairs = {key: (old.get(key, nothing), settings.get(key, nothing)) for key in {**old, **settings}}
        changed = [
            f"  {key}: {a} -> {b}" for key, (a, b) in pairs.items() if json.dumps(a.value) != json.dumps(b.value)
        ]
        if changed:
            raise InvalidInputError(
                f"{folder} holds a run made from something else (there -> asked for):\n" + "\n".join(changed) + "\n"
                "Give another --output, or the settings of that run to go on with it, or --overwrite to start anew "
                "there."
            )
        return
    if leftovers:
        listed = ", ".join(p.name for p in leftovers)
        raise InvalidInputError(
            f"{folder} holds {listed}, but no {_RECORD} that tells what they were made from; give another --output, or "
            "--overwrite to start anew there"
        )
    rows = {key: asdict(setting) for key, setting in settings.items()}
    write_atomically(path, json.dumps({"format": FORMAT, "settings": rows}, indent=2) + "\n")


def release(folder: Path) -> None:
    """Remove the record, so that another run can claim the folder."""
    (folder / _RECORD).unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Setting]:
    try:
        record = json.loads(path.read_bytes())
        version = record["format"]
        rows = record["settings"]
        found = {key: Setting(row["value"], str(row["name"])) for key, row in rows.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{path} is damaged ({named_error(error)}), so nobody knows what this run was made from; give "
            "another --output, or --overwrite to start anew there"
        ) from error
    if version != FORMAT:
        raise RunFolderError(
            f"{path} has format {version!r}, this version of specdec reads {FORMAT}; give another --output, or "
            "--overwrite to start anew there"
        )
    return found


class AnswerStore(KeptLines):
    """The target's answers by their question's hash, those of earlier processes among them.

    A line is a JSON object with `question`, `token_ids` and `check`, a hash of both and of the store's key: one that
    was altered, or comes from another store, is left out.

    Attributes:
        damaged: lines that were. answers: with those of other files that were `borrowed`.
    """

    error = RunFolderError
    remedy = "name another folder"
    lost = "its question is answered again"

    def __init__(self, path: Path, key: str) -> None:
        """key: identifies target and limits.

        Raises:
            RunFolderError: another process has the file. OutputError: it cannot be read or written.
        """
        self._key = key
        self.damaged = 0
        self.answers: dict[str, list[int]] = {}
        super().__init__(path, path.with_name(f".{path.stem}.lock"))

    def borrow(self, path: Path) -> None:
        """Take the answers of another file, where another process may be writing."""
        damaged = self.damaged
        for line in path.read_bytes().splitlines():
            self.take(line, path.name)
        self.damaged = damaged

    def add(self, question: str, token_ids: list[int]) -> None:
        """Append an answer; once this returns it outlives the process.

        Raises:
            OutputError: the file cannot be written; what was stored before stays.
        """
        self.write(self._line(question, token_ids).encode())
        self.answers[question] = token_ids

    def take(self, line: bytes, place: str) -> None:
        """Read an answer, if it is one of this store."""
        try:
            row = json.loads(line)
            question = row["question"]
            token_ids = row["token_ids"]
            is_whole = row["check"] == self._check(question, token_ids)
        except (ValueError, KeyError, TypeError):
            is_whole = False
        if is_whole:
            self.answers[question] = token_ids
        self.damaged += not is_whole

    def _line(self, question: str, token_ids: list[int]) -> str:
        line = {"question": question, "token_ids": token_ids, "check": self._check(question, token_ids)}
        return json.dumps(line, separators=(",", ":")) + "\n"

    def _check(self, question: str, token_ids: list[int]) -> str:
        return _hash((self._key, question, token_ids))[:16]

    def _read(self) -> None:
        super()._read()
        if self.damaged:
            write_atomically(self.path, "".join(self._line(*each) for each in self.answers.items()))


def kept_answers(folder: Path) -> int:
    """Number of lines in all answer stores of a folder, for display."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("answers-*.jsonl") if os.access(path, os.R_OK))


_SHORTEST = 2
"""Tokens of an answer that can be learned from: a bonus token and one after it."""


@dataclass(frozen=True)
class AnswerLimits:
    """max_new_tokens of an answer, max_length of a training sequence."""

    max_new_tokens: int = 512
    max_length: int = 1024

    def __post_init__(self) -> None:
        """Raises InvalidInputError for limits under which no answer can be learned from."""
        if self.max_new_tokens < _SHORTEST or self.max_length <= _SHORTEST:
            raise InvalidInputError(
                f"max_new_tokens must be at least {_SHORTEST} and max_length at least {_SHORTEST + 1} (a prompt, a "
                f"bonus token and a draft), not {self.max_new_tokens} and {self.max_length}"
            )


@dataclass(frozen=True)
class Questions:
    """Prompts (token ids of each) ready for the target, nothing answered yet; digest: of the prompts, 16 hex digits.

    room: tokens that each one's answer can have in a training sequence. key: identifies target and the longest answer:
    what an answer depends on besides its prompt. limits: of answers and training sequences.
    """

    prompts: list[list[int]]
    room: list[int]
    digest: str
    key: str
    limits: AnswerLimits

    @cached_property
    def hashes(self) -> list[str]:
        """Of each prompt."""
        return [_hash(list(prompt))[:16] for prompt in self.prompts]

    @property
    def usable(self) -> list[int]:
        """Indices of the questions whose answers can be learned from."""
        return [i for i, room in enumerate(self.room) if room >= _SHORTEST]


def prepare_questions(model: SpeculativeModel, questions: Sequence[Any], limits: AnswerLimits) -> Questions:
    """Encode questions, prompts as `SpeculativeModel.generate` takes them, and find which leave room for an answer.

    Raises:
        InvalidInputError: a prompt that cannot be encoded, a token outside the vocabulary, or no usable question.
    """
    prompts = encode_prompts(questions, model.tokenizer)
    vocab = model.target.vocab_size
    for number, prompt in enumerate(prompts, 1):
        if not prompt or not 0 <= min(prompt) <= max(prompt) < vocab:
            raise InvalidInputError(f"question {number} is empty or has a token outside the vocabulary of {vocab}")
    longest = min(limits.max_length, model.config.max_model_len)
    room = [min(longest - len(prompt), limits.max_new_tokens) for prompt in prompts]
    digest = _hash(prompts)[:16]
    target = target_fingerprint(model.hf_model)
    key = _hash((FORMAT, target, model.backend_name, model.config.max_model_len, limits.max_new_tokens))
    ready = Questions(prompts, room, digest, key, limits)
    if not ready.usable:
        raise InvalidInputError(
            f"all {len(prompts)} questions are too long: the shortest has {min(map(len, prompts))} tokens, and prompt "
            f"and answer together may have {longest}; raise max_length (the model allows {model.config.max_model_len})"
        )
    return ready


def answer_prepared(model: SpeculativeModel, questions: Questions, output: Path, console: Console) -> AnswerSet:
    """The target's own greedy answers. Each is kept in `output` as it comes; those kept there before, also of other
    sets of questions, are not generated again.

    Raises:
        RunFolderError: another process answers the same questions there. OutputError: `output` cannot be written.
        InvalidInputError: no answer has two tokens.
    """
    ours = f"answers-{questions.key[:16]}"
    left_out = len(questions.prompts) - len(questions.usable)
    if left_out:
        line = f"{left_out} of {len(questions.prompts)} questions leave no room for an answer; they are left out"
        console.print(line, highlight=False)
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    with AnswerStore(output / f"{ours}-{questions.digest}.jsonl", questions.key) as store:
        for path in output.glob(f"{ours}-*.jsonl"):
            store.borrow(path)
        if store.damaged:
            line = f"{store.damaged} lines of {store.path.name} are damaged; those questions are answered again"
            console.print(line, highlight=False)
        _answer_rest(model, questions, store, console)
        rooms = zip(questions.hashes, questions.room, strict=True)
        answers = [store.answers.get(question, []) if room >= _SHORTEST else [] for question, room in rooms]
    return answer_set(questions.prompts, answers, questions.limits.max_length)


def _hash(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()


def _answer_rest(model: SpeculativeModel, questions: Questions, store: AnswerStore, console: Console) -> None:
    asked = {questions.hashes[i]: questions.prompts[i] for i in questions.usable}
    rest = [question for question in asked if question not in store.answers]
    if not rest:
        return
    if len(rest) < len(asked):
        line = f"{len(asked) - len(rest)} answers are kept from an earlier run, {len(rest)} are missing"
        console.print(line, highlight=False)
    # Without the prefix cache: which questions an interrupted run has answered must not change how others round.
    params = SamplingParams(max_new_tokens=questions.limits.max_new_tokens, cache_prefix=False)
    each = model.generate_iter([asked[question] for question in rest], params)
    with LinesOfProgress(*LinesOfProgress.get_default_columns(), console=console) as shown:
        for index, completion in shown.track(each, len(rest), description="the target answers"):
            store.add(rest[index], completion.token_ids)
