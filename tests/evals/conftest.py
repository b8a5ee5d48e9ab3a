"""A scripted model: planted acceptance rates, planted failures, planted defects. No weights, no engine."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evals.data.datasets import DataSet, Question, digest
from evals.runs.conversations import Asking
from specdec.errors import InvalidInputError
from specdec.requests.request import Completion
from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import RequestStats, RoundRecord

EOS = 0


class CharTokenizer:
    """One token a character; 0 is the end token."""

    chat_template: str | None = "planted"
    eos_token_id = EOS

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [1] + [ord(c) for c in text]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(i) for i in ids if i > 1)

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return self("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")["input_ids"]


@dataclass
class ScriptedModel:
    """Answers with text that follows from the prompt; each draft j is accepted with probability rates[j].

    Attributes:
        length: new tokens of an answer, the end token included. seconds: a round takes 1 + seconds x drafts.
        defect: with drafts, every fourth token is another one. poison: prompts with this text raise.
        overshoot: the last round accepts drafts beyond the end (which are then trimmed).
        undrafted: a round has no drafts with this probability, as where they are looked up.
    """

    rates: tuple[float, ...] = (0.8, 0.6, 0.5)
    length: int = 40
    seconds: float = 0.1
    defect: bool = False
    overshoot: bool = False
    undrafted: float = 0.0
    keyed: bool = False
    poison: str | None = None
    max_k: int = 8
    calls: list[int] = field(default_factory=list)
    tokenizer: CharTokenizer = field(default_factory=CharTokenizer)
    head: Any = None

    def __post_init__(self) -> None:
        self.hf_model = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.ones_(self.hf_model.weight)
        self.config = SimpleNamespace(keyed=self.keyed)

    def describe(self) -> dict[str, Any]:
        graphs = {"state": "off: no GPU"}
        facts = {"target": "scripted", "device": "cpu", "dtype": "float32", "backend": "torch", "graphs": graphs}
        return {**facts, "head": None, "engine": {"num_speculative_tokens": self.max_k}}

    def generate(self, prompts: Any, params: Any) -> list[Completion]:
        return [completion for _, completion in sorted(self.generate_iter(prompts, params), key=lambda pair: pair[0])]

    def generate_iter(self, prompts: Any, params: Any) -> Any:
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        self.calls.append(len(prompts))
        texts = [p if isinstance(p, str) else self.tokenizer.decode(p) for p in prompts]
        if self.poison and any(self.poison in text for text in texts):
            raise InvalidInputError("the prompt is poisoned")
        done = [(i, self.complete(text, p)) for i, (text, p) in enumerate(zip(texts, each, strict=True))]
        return reversed(done)

    def complete(self, prompt: str, params: SamplingParams) -> Completion:
        k = self.max_k if params.num_speculative_tokens is None else params.num_speculative_tokens
        ids = self._ids(prompt, params, k)
        rng = random.Random(f"{prompt}/{params.seed}")
        rounds, drafts = [], []
        place = 1
        while place < len(ids):
            record = self._round(rng, k, len(ids) - place)
            rounds.append(record)
            drafts.append(tuple([*ids[place : place + record.accepted], *[ord("?")] * k][: record.drafted]))
            place += record.emitted
        seconds = sum(1 + self.seconds * r.drafted for r in rounds)
        stats = RequestStats(tuple(rounds), len(prompt), len(ids), 0.0, 0.5, seconds)
        text = self.tokenizer.decode(ids)
        reason = "eos" if ids[-1] == EOS else "length"
        return Completion(
            text, ids, [ord(c) for c in prompt], reason, stats, tuple(drafts) if params.return_drafts else None
        )

    def _ids(self, prompt: str, params: SamplingParams, k: int) -> list[int]:
        rng = random.Random(prompt if params.greedy else f"{prompt}/{params.seed}")
        ids = [ord("a") + rng.randrange(26) for _ in range(self.length - 1)] + [EOS]
        if params.ignore_eos:
            ids = [ord("z")] * params.max_new_tokens
        if self.defect and k:
            ids = [ord("!") if i % 4 == 3 and t else t for i, t in enumerate(ids)]
        return ids[: params.max_new_tokens]

    def _round(self, rng: random.Random, k: int, left: int) -> RoundRecord:
        if self.undrafted and rng.random() < self.undrafted:
            return RoundRecord(0, 0, 1)
        accepted = 0
        while accepted < k and rng.random() < self.rates[min(accepted, len(self.rates) - 1)]:
            accepted += 1
        if not self.overshoot:
            k = min(k, left - 1)
            accepted = min(accepted, k)
        return RoundRecord(max(k, 0), accepted, min(accepted + 1, left))


def questions(count: int, turns: int = 1, categories: Sequence[str] = ("all",)) -> DataSet:
    """A data set of `count` made-up questions."""
    made = tuple(
        Question(
            str(i),
            tuple(f"question {i} turn {t}" for t in range(turns)),
            (),
            categories[i % len(categories)],
            "made-up",
        )
        for i in range(count)
    )
    return DataSet("made-up", made, digest([q.turns for q in made]), "test")


def asking(**params: Any) -> Asking:
    """How to ask, with the chat template."""
    return Asking(SamplingParams(**{"max_new_tokens": 64, **params}), templated=True)


def loader(models: Mapping[str, Any]) -> Any:
    """A `load` for Worker that takes the model named by the spec's target."""
    return lambda spec: models[spec.target]


@pytest.fixture
def plant() -> SimpleNamespace:
    """The pieces of this file, for tests (a conftest cannot be imported)."""
    return SimpleNamespace(
        Model=ScriptedModel, Tokenizer=CharTokenizer, questions=questions, asking=asking, loader=loader, EOS=EOS
    )
