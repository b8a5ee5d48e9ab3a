"""Questions for a model: local JSONL first, the hub by name, and the generated arithmetic set; their prompts.

A file is JSON Lines. Each object has `turns` (list of user messages), `prompt` (text, or a list taken as turns),
`question` (GSM8K) or `messages` (a chat whose last message is of the user).
`question_id`, `task_id`, `prompt_id` or `id` names it (else its number), `category` groups it.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from evals.errors import DataError, require
from specdec.errors import InvalidInputError
from specdec.user_warnings import warn_user

DATA_VARIABLE = "SPECDEC_DATA"
MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
_ID_KEYS = ("question_id", "task_id", "prompt_id", "id")

Labels = Callable[[str], str]
"""What a data set calls a category -> the task it is reported under."""
Turns = tuple[tuple[str, str], ...]
"""(role, text) of each message."""
Chat = tuple[tuple[str, ...], Turns]
"""The turns of a conversation, and its messages before them."""
Messages = list[dict[str, str]]
"""Messages as a chat template takes them."""
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """One conversation to hold with the model; id: unique inside its data set.

    turns: user messages, between which the model's own answers go. history: messages before the first turn. category:
    what the data set calls it. task: the group it is reported under (Spec-Bench has six tasks).
    """

    id: str
    turns: tuple[str, ...]
    history: Turns = ()
    category: str = "all"
    task: str = "all"


@dataclass(frozen=True)
class DataSet:
    """A named list of questions and the hash of what they were read from."""

    name: str
    questions: tuple[Question, ...]
    sha256: str
    source: str

    def limited(self, limit: int | None) -> DataSet:
        """Take `limit` questions spread evenly over the set, so that every category keeps its share.

        Raises:
            DataError: the limit is below 1.

        >>> [i * 10 // 4 for i in range(4)]
        [0, 2, 5, 7]
        """
        total = len(self.questions)
        if limit is None or limit >= total:
            return self
        if limit < 1:
            raise DataError(f"--limit is {limit}; it must be at least 1")
        picked = tuple(self.questions[i * total // limit] for i in range(limit))
        return replace(self, questions=picked)


@dataclass(frozen=True)
class Named:
    """A known data set.

    Attributes:
        path: its place under the data folder. hub: its name there, configuration and split.
        task: maps a category to the task it is reported under. questions: how many it has as published.
    """

    path: str
    hub: tuple[str, str | None, str] | None
    task: Labels
    questions: int


NAMED: Mapping[str, Named] = {
    "mt_bench": Named(
        "mt_bench/question.jsonl", ("HuggingFaceH4/mt_bench_prompts", None, "train"), lambda _: "mt_bench", 80
    ),
    "spec_bench": Named(
        "spec_bench/question.jsonl", None, lambda said: "mt_bench" if said in MT_BENCH_CATEGORIES else said, 480
    ),
    "gsm8k": Named("gsm8k/test.jsonl", ("openai/gsm8k", "main", "test"), lambda _: "gsm8k", 1319),
    "humaneval": Named(
        "humaneval/HumanEval.jsonl", ("openai/openai_humaneval", None, "test"), lambda _: "humaneval", 164
    ),
}


def load(name: str, *, data_dir: Path | None = None, limit: int | None = None, seed: int = 0) -> DataSet:
    """Load questions by file, by known name, by "arithmetic" (generated) or by hub name "owner/name[:split]".

    A known name is read from `data_dir` or $SPECDEC_DATA when one is set, from the hub otherwise.

    Raises:
        DataError: nothing found, an empty set, a malformed line (named by number), or two questions with one id.
    """
    if name.endswith((".jsonl", ".json")) or Path(name).is_file():
        return _from_file(Path(name), Path(name).stem, lambda _: Path(name).stem).limited(limit)
    if name == "arithmetic":
        from evals.data.arithmetic import problems

        drawn = problems("heldout", limit or 200, seed)
        questions = tuple(
            Question(str(i), (problem.question,), category="arithmetic", task="arithmetic")
            for i, problem in enumerate(drawn)
        )
        return DataSet(
            "arithmetic", questions, digest([q.turns for q in questions]), f"evals.data.arithmetic seed {seed}"
        )
    if name in NAMED:
        return _named(name, data_dir).limited(limit)
    if "/" in name:
        repository, _, split = name.partition(":")
        return _from_hub(name, (repository, None, split or "test"), lambda category: category).limited(limit)
    known = ", ".join(sorted([*NAMED, "arithmetic"]))
    raise DataError(f"unknown data set {name!r}; known are {known}, a .jsonl file, or a hub name such as owner/name")


def data_folder(data_dir: Path | None) -> Path | None:
    """The folder with local data: the argument, else $SPECDEC_DATA, else None.

    Raises:
        DataError: it does not exist.
    """
    given = data_dir or (Path(os.environ[DATA_VARIABLE]) if os.environ.get(DATA_VARIABLE) else None)
    if given is not None and not given.is_dir():
        raise DataError(f"the data folder {given} does not exist; pass --data-dir or set {DATA_VARIABLE}")
    return given


def read_jsonl(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield (line number, object) of a JSON Lines file without blank lines.

    Raises:
        DataError: no file, or a line is no JSON object.
    """
    if not path.is_file():
        raise DataError(f"the file {path} does not exist")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                where = f"{path}:{number}"
                try:
                    record = json.loads(line.decode("utf-8"))
                except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are both ValueErrors
                    raise DataError(f"{where}: not a line of JSON in UTF-8 ({error})") from error
                if not isinstance(record, dict):
                    raise DataError(f"{where}: a JSON object is needed, this is {type(record).__name__}")
                yield number, record


def _named(name: str, data_dir: Path | None) -> DataSet:
    known = NAMED[name]
    folder = data_folder(data_dir)
    path = None if folder is None else folder / known.path
    if path is not None and path.is_file():
        data = _from_file(path, name, known.task)
        place = str(path)
    elif known.hub is not None and path is None:
        data = _from_hub(name, known.hub, known.task)
        place = known.hub[0]
    else:
        where = folder or f"the data folder ({DATA_VARIABLE} or --data-dir)"
        raise DataError(f"data set {name!r} needs the file {known.path} in {where}")
    if len(data.questions) != known.questions:  # results of a part are not those of the set
        raise DataError(
            f"{name!r} has {known.questions} questions, {place} holds {len(data.questions)}: it is cut off or "
            "another set. Get it whole (and take fewer by --limit), or measure it under its own name by giving the "
            "file itself: --data FILE.jsonl"
        )
    return data


def _from_file(path: Path, name: str, task: Labels) -> DataSet:
    rows = ((f"{path}:{number}", record) for number, record in read_jsonl(path))
    questions = _questions(rows, name, task)
    return DataSet(name, questions, hashlib.sha256(path.read_bytes()).hexdigest(), path.name)


def _from_hub(name: str, address: tuple[str, str | None, str], task: Labels) -> DataSet:
    repository, config, split = address
    require("datasets", "eval")
    import datasets

    try:
        records = list(datasets.load_dataset(repository, config, split=split))
    except (OSError, ValueError) as error:  # not found, offline, no such split
        raise DataError(
            f"data set {name!r}: cannot load {repository} (split {split}) from the hub ({error}); "
            f"give a local .jsonl file, or a folder with {DATA_VARIABLE} or --data-dir"
        ) from error
    rows = ((f"{repository}[{i}]", record) for i, record in enumerate(records))
    return DataSet(name, _questions(rows, name, task), digest(records), f"hub:{repository}:{split}")


def digest(value: Any) -> str:
    """sha256 of a JSON value in canonical form."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _questions(rows: Iterable[tuple[str, Record]], name: str, task: Labels) -> tuple[Question, ...]:
    seen: dict[str, str] = {}
    questions: list[Question] = []
    for where, record in rows:
        identity = next((record[key] for key in _ID_KEYS if record.get(key) is not None), str(len(questions)))
        category = str(record.get("category") or name)
        turns, history = _conversation(record, where)
        question = Question(str(identity), turns, history, category, task(category))
        if question.id in seen:
            raise DataError(f"{where}: the question id {question.id!r} is already used at {seen[question.id]}")
        seen[question.id] = where
        questions.append(question)
    if not questions:
        raise DataError(f"data set {name!r} has no questions")
    return tuple(questions)


def _conversation(record: Record, where: str) -> Chat:
    if record.get("messages") is not None:
        messages = record["messages"]
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise DataError(f"{where}: 'messages' must be a list of objects with the texts 'role' and 'content'")
        if messages[-1]["role"] != "user":
            raise DataError(f"{where}: the last message must have the role 'user', not {messages[-1]['role']!r}")
        return (messages[-1]["content"],), tuple((m["role"], m["content"]) for m in messages[:-1])
    for key in ("turns", "prompt", "question"):
        if (given := record.get(key)) is not None:
            turns = (given,) if isinstance(given, str) else given
            if not isinstance(turns, (list, tuple)) or not turns or not all(map(_is_text, turns)):
                raise DataError(f"{where}: {key!r} must be text or a list of texts, none of them empty")
            return tuple(turns), ()
    raise DataError(f"{where}: needs one of 'turns', 'prompt', 'question' or 'messages'; it has {sorted(record)}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and _is_text(value.get("role")) and _is_text(value.get("content"))


NO_TEMPLATE = (
    "the tokenizer has no chat template: prompts are sent as plain text. A head trained on templated conversations "
    "accepts fewer drafts on such prompts, so acceptance measured here is not comparable with templated runs"
)


def warn_without_template() -> None:
    """Warn that prompts go out as plain text, and what that costs."""
    warn_user(NO_TEMPLATE)


def opening(question: Question, system: str | None) -> Messages:
    """The messages before the first turn: the system prompt, then the question's own history."""
    start = [{"role": "system", "content": system}] if system else []
    return start + [{"role": role, "content": content} for role, content in question.history]


def render(tokenizer: Any, messages: Sequence[dict[str, str]], templated: bool) -> list[int]:
    """Prompt token ids of a conversation that ends with a user message; untemplated, its contents joined by blank
    lines.

    Raises:
        InvalidInputError: the chat template refuses the conversation.
    """
    if not templated:
        return list(tokenizer("\n\n".join(m["content"] for m in messages))["input_ids"])
    try:
        ids = tokenizer.apply_chat_template(
            list(messages), tokenize=True, add_generation_prompt=True, return_dict=False
        )
    except TemplateError as error:
        roles = ", ".join(m["role"] for m in messages)
        raise InvalidInputError(f"the chat template refuses a conversation with the roles {roles}: {error}") from error
    return list(ids)
