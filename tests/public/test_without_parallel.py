"""The parallel wing can be absent: one process loads and generates as with it, and several are refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from specdec import SamplingParams, SpeculativeModel
from tests.rank_server import run_python

__all__ = ["run_python"]
ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["Question: What is 12 + 30?\nAnswer:", "Question: Tom has 3 apples and buys 4. How many has he?\nAnswer:"]
CODE = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "specdec.extensions.parallel" or name.startswith("specdec.extensions.parallel."):
            raise ImportError(f"planted: {name} is not there")

sys.meta_path.insert(0, Absent())
from specdec import SamplingParams, SpecdecError, SpeculativeModel

with SpeculativeModel.from_pretrained("gsm-llama", "auto", device="cpu", num_speculative_tokens=3) as model:
    found = [done.token_ids for done in model.generate(json.loads(sys.argv[1]), SamplingParams(max_new_tokens=24))]
    refused = model.ranks, model.describe()["tensor_parallel"]
try:
    SpeculativeModel.from_pretrained("gsm-llama", "auto", device="cpu", tensor_parallel_size=2)
except SpecdecError as error:
    print(json.dumps([found, refused, type(error).__name__, str(error)]))
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_a_process_without_the_parallel_wing_says_the_same(run_python: Any) -> None:
    with SpeculativeModel.from_pretrained("gsm-llama", "auto", device="cpu", num_speculative_tokens=3) as model:
        right = [list(done.token_ids) for done in model.generate(PROMPTS, SamplingParams(max_new_tokens=24))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python(CODE, json.dumps(PROMPTS), env=environment)
    assert done.returncode == 0, done.stderr
    found, refused, kind, said = json.loads(done.stdout.splitlines()[-1])
    assert found == right and refused == [None, None]
    assert (
        kind == "ModelLoadError"
        and said.startswith("tensor_parallel_size=2: ")
        and "specdec.extensions.parallel" in said
    )
