"""`specdec eval gsm8k --backends`: which rows are paired with which, and what a backend refuses stays in the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

from evals.accuracy.accuracy import Measured, grid_document
from evals.cli.eval_options import Listed
from evals.cli.main import evaluate


def result(*right: int) -> dict[str, Any]:
    """lm-eval's samples of one task, a document each."""
    samples = [
        {"doc_id": n, "filter": "strict", "metrics": ["exact_match"], "exact_match": r} for n, r in enumerate(right)
    ]
    return {"samples": {"gsm8k": samples}}


def measured(model: str, backend: str, *of_arms: tuple[int, ...], tested: bool = True) -> Measured:
    arms = zip(("target alone", "K=5"), of_arms, strict=True)
    return Measured(model, backend, {}, tuple((name, result(*right), tested) for name, right in arms))


def test_every_row_is_paired_with_its_models_first() -> None:
    found = grid_document(
        [
            Measured("a", "flex", refused="does not serve MLA"),
            measured("a", "torch", (1, 1, 0, 0), (1, 0, 0, 0)),
            measured("a", "flashinfer", (1, 1, 0, 0), (0, 1, 1, 1)),
            measured("b", "torch", (0, 0), (1, 1), tested=False),
        ]
    )
    rows = [(r["model"], r["backend"], r.get("arm"), r.get("only_a"), r.get("only_b")) for r in found["rows"]]
    assert rows == [
        ("a", "flex", None, None, None),
        ("a", "torch", "target alone", 0, 0),
        ("a", "torch", "K=5", 1, 0),
        ("a", "flashinfer", "target alone", 0, 0),
        ("a", "flashinfer", "K=5", 1, 2),
        ("b", "torch", "target alone", 0, 0),
        ("b", "torch", "K=5", 0, 2),
    ]
    assert [r.get("reference") for r in found["rows"]] == [None, True, False, False, False, True, False]
    last = found["rows"][-1]
    assert (last["right_a"], last["right_b"], last["difference"], last["p_value"]) == (0, 2, 1.0, 0.5)
    assert found["rows"][0]["refused"] == "does not serve MLA" and not last["tested"]


def run(tmp_path: Path, *arguments: str) -> Any:
    fixed = ["gsm8k", "--tasks", "specdec_arithmetic", "--run-dir", str(tmp_path / "runs")]
    return CliRunner().invoke(evaluate, [*fixed, *arguments])


@pytest.mark.slow
@pytest.mark.thorough
def test_the_command(tmp_path: Path) -> None:
    """A backend of which this machine has none, and one that runs."""
    out = tmp_path / "grid.json"
    options = (
        "--model",
        "gsm-llama",
        "--limit",
        "2",
        "--max-new-tokens",
        "16",
        "--dtype",
        "float32",
        "--device",
        "cpu",
    )
    done = run(tmp_path, *options, "--backends", "flex,torch", "--output", str(out))
    assert done.exit_code == 0, done.output
    assert "gsm-llama on flex: refused: backend='flex' needs a CUDA device, not cpu" in done.output
    rows = json.loads(out.read_text("utf-8"))["rows"]
    assert [(row["backend"], row.get("arm")) for row in rows] == [
        ("flex", None),
        ("torch", "target alone"),
        ("torch", "K=5"),
    ]
    assert rows[2]["total"] == 2 and rows[2]["tested"] and rows[2]["only_a"] == rows[2]["only_b"] == 0
    assert (tmp_path / "runs" / "gsm-llama-torch").is_dir()


@pytest.mark.parametrize(
    ("backends", "more", "message"),
    [
        (
            "torch,fast",
            (),
            "'fast' is not one of 'torch', 'flashinfer', 'flex', 'batch_invariant'",
        ),
        ("torch", ("--backend", "flex"), "--backends torch and --backend flex exclude each other"),
    ],
)
def test_what_is_refused_before_anything_is_loaded(
    backends: str, more: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = run(tmp_path, "--backends", backends, *more)
    assert done.exit_code == 2 and message in " ".join(done.output.split())


def test_a_backend_is_named_once() -> None:
    assert Listed("text", click.STRING).convert("torch, flex,torch", None, None) == ("torch", "flex")
