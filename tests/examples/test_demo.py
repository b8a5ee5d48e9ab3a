"""The demonstration's problems were never trained on."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from evals.data.arithmetic import is_heldout

_DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


def test_every_problem_of_the_demonstration_is_held_out() -> None:
    spec = spec_from_file_location("demo", _DEMO)
    assert spec is not None and spec.loader is not None
    demo = module_from_spec(spec)
    spec.loader.exec_module(demo)
    assert len(demo.PROBLEMS) == 8
    assert all(map(is_heldout, demo.PROBLEMS))
    assert not is_heldout(demo.PROBLEMS[0].replace("146", "148")), "the check can fail"
