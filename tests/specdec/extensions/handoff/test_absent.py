"""Without the package `specdec.extensions.handoff` everything else works, and what needs it says so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.rank_server import run_python

__all__ = ["run_python"]
ROOT = Path(__file__).resolve().parents[4]
CODE = """
import sys
if {absent}:
    sys.modules["specdec.extensions.handoff"] = None  # as where it is not installed: an ImportError
from specdec import SamplingParams, SpeculativeModel
with SpeculativeModel.from_pretrained("gsm-llama", "auto", device="cpu", num_speculative_tokens=3) as model:
    params = [SamplingParams(max_new_tokens=12), SamplingParams(max_new_tokens=12, temperature=0.8, seed=1)]
    done = model.generate(["Tom has 3 apples.", "A farm has 40 cows."], params)
    print([(c.token_ids, c.drafts, c.stats.rounds) for c in done], model.usage())
    print([name for name in sys.modules if name.startswith("specdec.extensions.handoff.")])
    for call in (lambda: model.prefill("Tom"), lambda: model.resume([]), lambda: model.open_transfer("sockets")):
        try:
            call()
            print("done")
        except Exception as error:
            print(type(error).__name__, error)
"""


def run(run_python: Any, absent: bool) -> list[str]:
    """What the code prints in a fresh process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python(CODE.format(absent=absent), env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.thorough
def test_a_model_loads_and_generates_without_it(run_python: Any) -> None:
    """Nor does a model import it that no request moves into or out of."""
    with_it, without = run(run_python, absent=False), run(run_python, absent=True)
    assert with_it[:2] == without[:2] and with_it[1] == "[]"
    assert len(set(without[2:])) == 1 and without[2].startswith(
        "InvalidInputError requests cannot move between models without specdec.extensions.handoff: "
    )
    assert "still held" in with_it[4] and with_it[3] == "done"
