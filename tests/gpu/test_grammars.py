"""Grammars over CUDA graphs: drafts change no bit, and what is generated is valid by other means."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import regex
import torch

from specdec import Grammar
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from tests.gpu.test_logits_options import QUESTIONS

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["apples", "pens"]}},
    "required": ["n", "kind"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMARS: list[Any] = [
    Grammar.json(SCHEMA),
    Grammar.regex("[a-z]{3,12} [0-9]{1,4}"),
    None,
    Grammar.choice(["yes", "no", "maybe"]),
    Grammar.regex("[0-9]{1,6}", begin="#### "),
    Grammar.lark('start: "(" (N ",")* N ")"\nN: /[0-9]{1,3}/'),
]
VALID: list[Any] = [
    lambda text: json.loads(text)["kind"] in ("apples", "pens"),
    lambda text: regex.fullmatch("[a-z]{3,12} [0-9]{1,4}", text),
    lambda text: True,
    lambda text: text in ("yes", "no", "maybe"),
    lambda text: "#### " not in text or regex.fullmatch("[0-9]{1,6}", text.split("#### ")[1]),
    lambda text: regex.fullmatch(r"\(([0-9]{1,3},)*[0-9]{1,3}\)", text),
]


@cache
def answers(k: int, draft: str | None = "auto") -> list[Any]:
    """Greedy and sampled, of mixed batches."""
    load = SpeculativeModel.from_pretrained
    options: dict[str, Any] = {"max_num_seqs": 12, "dtype": torch.float16, "backend": "batch_invariant"}
    with load("gsm-llama", draft, num_speculative_tokens=5 if draft else 0, **options) as model:
        asked = [f"Question: {QUESTIONS[i % 8]}\nAnswer:" for i in range(48)]
        params = [
            SamplingParams(
                128,
                grammar=GRAMMARS[i % 6],
                temperature=float(i // 24),
                seed=i,
                num_speculative_tokens=min(k, model.num_speculative_tokens),
            )
            for i in range(48)
        ]
        return model.generate(asked, params)


@pytest.mark.parametrize(("k", "draft"), [(5, "auto"), (0, "auto"), (0, None)])
def test_all_are_valid(k: int, draft: str | None) -> None:
    found = answers(k, draft)
    ended = [(i, c) for i, c in enumerate(found) if c.finish_reason == "eos" and i % 6 != 2]
    assert len(ended) > 20
    assert [(i, c.text) for i, c in ended if not VALID[i % 6](c.text)] == []


def test_drafts_change_no_bit() -> None:
    found, plain, alone = (answers(5), answers(0), answers(0, None))
    assert [c.token_ids for c in found[:24]] == [c.token_ids for c in plain[:24]]
    assert [c.token_ids for c in plain] == [c.token_ids for c in alone]
    assert sum(r.accepted for c in found for r in c.stats.rounds) > 50
