"""Recurrence and long rotary embeddings can be absent: a fresh process without either answers as with it."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.hf.mixing import MIXING_FUNCTIONS, MIXING_OPERATORS
from attention.recurrence.hf_calls import STAND_INS
from attention.recurrence.runner import OUTPUTS
from specdec import SamplingParams, SpeculativeModel
from tests.rank_server import run_python

__all__ = ["run_python"]
ROOT = Path(__file__).resolve().parents[3]
WINGS = {
    "recurrence": [
        "attention.recurrence",
        "specdec.extras.recurrent_states",
        "specdec.selftest.recurrences",
    ],
    "long rope": ["specdec.extras.long_factors"],
}
PROMPTS = ["Question: What is 12 + 30?\nAnswer:", "Question: Tom has 3 apples and buys 4. How many has he?\nAnswer:"]
CODE = """
import json, sys

absent, pair, prompts = json.loads(sys.argv[1])

class Absent:
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in absent):
            raise ImportError(f"planted: {name} is not there")

sys.meta_path.insert(0, Absent())
from specdec import SamplingParams, SpecdecError, SpeculativeModel

with SpeculativeModel.from_pretrained(pair, "auto", device="cpu", num_speculative_tokens=3) as model:
    found = [done.token_ids for done in model.generate(prompts, SamplingParams(max_new_tokens=24))]
    engine = model.describe()["engine"]
try:
    from hybrids import tiny_hybrid
    from specdec.wrapped.probing import probe_target
    probe_target(tiny_hybrid("qwen3_next"))
    said = ""
except SpecdecError as error:
    said = f"{type(error).__name__}: {error}"
print(json.dumps([found, engine["fold_rule"], engine["long_rope"], said]))
"""


@functools.cache
def right(pair: str) -> list[list[int]]:
    """What this process says, which has every wing."""
    with SpeculativeModel.from_pretrained(pair, "auto", device="cpu", num_speculative_tokens=3) as model:
        return [list(done.token_ids) for done in model.generate(PROMPTS, SamplingParams(max_new_tokens=24))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wing", "pair"),
    [
        ("recurrence", "gsm-llama"),
        pytest.param("recurrence", "gsm-deepseek", marks=pytest.mark.long),
        ("long rope", "gsm-llama"),
    ],
)
@pytest.mark.thorough
def test_a_process_without_a_wing_says_the_same(wing: str, pair: str, run_python: Any) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    done = run_python(CODE, json.dumps([WINGS[wing], pair, PROMPTS]), env=environment)
    assert done.returncode == 0, done.stderr
    found, fold_rule, long_rope, said = json.loads(done.stdout.splitlines()[-1])
    assert found == right(pair) and fold_rule is None and long_rope is None
    if wing == "recurrence":
        assert said.startswith("UnsupportedModelError: ") and "recurrent layers need attention.recurrence: " in said
    else:
        assert said == ""


def test_what_is_known_of_recurrent_layers_without_their_code_is_what_the_code_serves() -> None:
    assert tuple(STAND_INS) == MIXING_FUNCTIONS
    assert tuple(OUTPUTS) == MIXING_OPERATORS
    assert all(hasattr(torch.ops.specdec, name) for name in MIXING_OPERATORS)
