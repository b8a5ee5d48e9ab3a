"""Random wrong values for every public parameter: whatever is given, a `SpecdecError` comes or a result, nothing else.

`SPECDEC_RANDOM_CALLS=2000 pytest -s tests/public/test_random_values.py` makes that many calls and prints how many of
each kind were served and refused; `SPECDEC_RANDOM_SEED` chooses others.
"""

from __future__ import annotations

import inspect
import os
import random
import string
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click import Command, Group, Option
from click.testing import CliRunner
from fakes import LETTERS, LetterTokenizer, hf_greedy, table_head, tiny_llama, wrap
from transformers import GenerationConfig

from specdec import SamplingParams, SpecdecError, SpeculativeModel
from specdec.cli.main import cli

CALLS = int(os.environ.get("SPECDEC_RANDOM_CALLS", "60"))
SEED = int(os.environ.get("SPECDEC_RANDOM_SEED", "0"))
PROMPT = [1, 2, 3]
SHORT = SamplingParams(max_new_tokens=4)
Call = Callable[[random.Random], tuple[str, Callable[[], object]]]

INTEGERS = (
    -(2**63),
    -(10**18),
    -(2**31),
    -2,
    -1,
    0,
    1,
    2,
    3,
    64,
    2**31 - 1,
    2**31,
    2**62,
    2**63,
    2**64,
    10**15,
    10**400,
)
FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"), -float("inf"))
TEXTS = (
    *(
        "",
        " ",
        "a",
        "abc",
        "auto",
        "mtp",
        "none",
        "cpu",
        "cuda:9",
        "float32",
        "torch",
        "gsm-llama",
        "0",
        "1",
        "-1",
        "1e9",
    ),
    *(
        "nan",
        "None",
        "true",
        "[]",
        "{}",
        ".",
        "..",
        "/",
        "./nothing",
        "/dev/null",
        "~",
        "a/b",
        "a/b/c",
        "http://x",
        "\0",
    ),
    *("a\0b", "\n", "ä", "日本語", "\ud800", "🙂" * 9, "x" * 10**5, "%s%n{0}", "--help", "key=value", "../" * 40),
)


class Odd:
    """An object that says no to what most code asks of an object."""

    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    __hash__ = None  # type: ignore[assignment]


class AnyTokenizer(LetterTokenizer):
    """Knows every character: what it does not know is the first letter."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [max(LETTERS.find(letter), 0) for letter in text]}


def scalar(rng: random.Random) -> Any:
    """A value without others in it."""
    kind = rng.randrange(14)
    plain: dict[int, Callable[[], Any]] = {
        0: lambda: None,
        1: lambda: rng.choice((True, False)),
        2: lambda: rng.choice(INTEGERS),
        3: lambda: rng.choice(FLOATS),
        4: lambda: rng.choice(TEXTS),
        5: lambda: rng.choice((b"", b"abc", bytearray(b"a"), b"\xff\0")),
        6: lambda: rng.choice(
            (np.float32(0.5), np.int64(3), np.bool_(True), np.array(2), np.zeros(0), np.ones((2, 2)))
        ),
        7: lambda: rng.choice(
            (torch.tensor(2), torch.tensor(0.5), torch.zeros(0), torch.ones(2, 2), torch.ones(3).long())
        ),
        8: lambda: torch.ones(2, device="meta"),
        9: lambda: rng.choice((Path("nothing"), Path("/dev/null"), Path(), Path("/"))),
        10: lambda: rng.choice((Odd(), object(), 1j, range(3), slice(2), NotImplemented, Ellipsis, ValueError("x"))),
        11: lambda: rng.choice((len, lambda: 3, SamplingParams, dict, torch.nn.Module, LetterTokenizer, string)),
        12: lambda: rng.choice((SHORT, GenerationConfig(), torch.float16, torch.device("cpu"), torch.nn.Linear(1, 1))),
        13: lambda: (i for i in range(3)),
    }
    return plain[kind]()


def value(rng: random.Random, depth: int = 0) -> Any:
    """Anything: a scalar, or a container of anything."""
    if depth > 2 or rng.random() < 0.7:
        return scalar(rng)
    items = [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if rng.random() < 0.6:
        return rng.choice((list, tuple))(items)
    names = [rng.choice(("role", "content", "temperature", "stop", 3, "")) for _ in items]
    return rng.choice((dict(zip(names, items, strict=True)), {i for i in items if isinstance(i, (int, str))}))


def messages(rng: random.Random) -> Any:
    """Something like a conversation."""
    return [{"role": value(rng), "content": value(rng)} for _ in range(rng.randrange(1, 3))]


def likely(rng: random.Random, default: Any) -> Any:
    """A value of the type that a parameter's default has, which may still be a wrong one."""
    if default is None:
        return rng.choice((rng.choice(INTEGERS), rng.choice(TEXTS)))
    kinds: dict[type, tuple[Any, ...]] = {bool: (True, False), int: INTEGERS, float: FLOATS, str: TEXTS}
    return rng.choice(kinds.get(type(default), TEXTS))


def options(rng: random.Random, function: Any) -> dict[str, Any]:
    """Random values for one to three of a function's parameters, a third of them of the right type."""
    known = {name: p for name, p in inspect.signature(function).parameters.items() if name not in ("cls", "self")}
    names = rng.sample(list(known), rng.randrange(1, 4))
    return {name: likely(rng, known[name].default) if rng.random() < 0.35 else value(rng) for name in names}


def loading(rng: random.Random) -> tuple[str, Callable[[], object]]:
    """`from_pretrained` of a tiny model with some options wrong."""
    given = options(rng, SpeculativeModel.from_pretrained)
    model = tiny_llama()
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "kv_cache_tokens": 400, "tokenizer": LetterTokenizer()}
    if rng.random() < 0.5:
        sizes["draft"] = table_head(model)
    return f"from_pretrained {sorted(given)}", lambda: SpeculativeModel.from_pretrained(
        **{"target": model, **sizes, **given}
    )


def sampling(rng: random.Random) -> tuple[str, Callable[[], object]]:
    """SamplingParams of random fields, from_dict of a random mapping; what is accepted must generate."""
    names = [field.name for field in fields(SamplingParams)]
    given = {name: value(rng) for name in rng.sample(names, rng.randrange(1, 3))}
    model = MODEL[0]
    made: Callable[[], Any]
    if rng.random() < 0.3:
        made = lambda: SamplingParams.from_dict(value(rng))  # noqa: E731
    else:
        made = (lambda: SamplingParams(**given)) if rng.random() < 0.5 else (lambda: SamplingParams.from_dict(given))
    return f"SamplingParams {sorted(given)}", lambda: model.generate(PROMPT, made())


def hf_sampling(rng: random.Random) -> tuple[str, Callable[[], object]]:
    """A GenerationConfig of transformers with random values; those that it refuses itself are left out."""
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "eos_token_id", "stop_strings", "do_sample")
    names += ("num_return_sequences", "max_length", "num_beams", "repetition_penalty", "seed")
    given = {name: value(rng) for name in rng.sample(names, rng.randrange(1, 3))}
    config = GenerationConfig(max_new_tokens=4)
    for name, wrong in given.items():
        setattr(config, name, wrong)
    return f"GenerationConfig {sorted(given)}", lambda: MODEL[0].generate(PROMPT, config)


def asking(rng: random.Random) -> tuple[str, Callable[[], object]]:
    """`generate`, `generate_iter` and `stream` with wrong prompts or wrong parameters."""
    name = rng.choice(("generate", "generate_iter", "stream"))
    prompts = rng.choice((value, messages, lambda r: [PROMPT, value(r)]))(rng)
    given = SHORT if rng.random() < 0.6 else value(rng)
    if rng.random() < 0.3:
        prompts = PROMPT
    return name, lambda: list(getattr(MODEL[0], name)(prompts, given))


SAFE = {
    "generate": ["hi", "--max-new-tokens", "2"],
    "inspect": [],
    "train block": ["--data", "./nothing.jsonl", "--output", "made"],
    "train eagle3": ["--data", "./nothing.jsonl", "--output", "made"],
    "train mtp": ["--data", "./nothing.jsonl", "--output", "made"],
    "eval acceptance": ["--data", "./nothing.jsonl"],
    "eval lossless": ["--data", "./nothing.jsonl"],
    "eval compare": ["auto", "k=3", "--data", "./nothing.jsonl"],
}
"""Commands and arguments that make each a short one, or one that its missing data ends before a model is loaded."""


def command_of(words: str) -> Command:
    found: Command = cli
    for word in words.split():
        assert isinstance(found, Group)
        next_ = found.get_command(None, word)  # type: ignore[arg-type]
        assert next_ is not None
        found = next_
    return found


def text(rng: random.Random) -> str:
    """A value as a shell gives it: no byte 0, no surrogates, not as long as a book."""
    given = value(rng)
    said = (
        given if isinstance(given, str) else str(given) if isinstance(given, (int, float)) and given != 10**400 else "x"
    )
    return said.replace("\0", "").encode("utf-8", "ignore").decode()[:5000]


def command_line(rng: random.Random) -> tuple[str, Callable[[], object]]:
    """A command with some options wrong."""
    words = rng.choice(list(SAFE))
    known = [p for p in command_of(words).params if isinstance(p, Option) and p.name not in ("data", "ray", "workers")]
    arguments = [*words.split(), *SAFE[words]]
    for option in rng.sample(known, rng.randrange(1, 3)):
        arguments.append(option.opts[0])
        if not option.is_flag:
            arguments.append(text(rng))

    def run() -> object:
        here = Path.cwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                result = CliRunner().invoke(cli, arguments)
            finally:
                os.chdir(here)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        if result.exit_code:
            raise SpecdecError(f"exit code {result.exit_code}")
        return None

    return f"specdec {' '.join(repr(a[:60]) for a in arguments)}", run


MODEL: list[Any] = []


@pytest.fixture(scope="module", autouse=True)
def model() -> Any:
    target = tiny_llama()
    MODEL.append(wrap(target, table_head(target), num_speculative_tokens=2, max_model_len=48, tokenizer=AnyTokenizer()))
    yield
    MODEL.clear()


SHARES: dict[str, tuple[Call, float]] = {
    "from_pretrained": (loading, 0.3),
    "generate, generate_iter, stream": (asking, 0.3),
    "SamplingParams": (sampling, 0.2),
    "GenerationConfig": (hf_sampling, 0.1),
    "the command line": (command_line, 0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.cases(1)
def test_random_values_are_served_or_refused_by_name(kind: str) -> None:
    make, part = SHARES[kind]
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    expected = hf_greedy(PROMPT, 4)
    for number in range(int(CALLS * part)):
        rng = random.Random(f"{SEED} {kind} {number}")
        what, call = make(rng)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                call()
                counts["served"] += 1
            except SpecdecError as error:
                counts["refused"] += 1
                assert str(error), what
            except Exception as error:
                counts["wrong"] += 1
                wrong.append(f"call {number}, {what}: {type(error).__name__}: {str(error)[:200]}")
        after = MODEL[0].generate(PROMPT, SHORT)[0].token_ids
        assert after == expected, f"the model is of no use after call {number}, {what}"
    print(f"\n{kind}: {sum(counts.values())} calls, {dict(counts)}")
    assert not wrong, "\n".join(wrong)
