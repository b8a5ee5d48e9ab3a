"""What of the round benchmark needs no GPU. Its acceptance is tested in test_synthetic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from benchmarks.bench_round import Moments, floor, full_rounds, graphs_of, main, measured
from benchmarks.engines import sizes_of, wrapped
from benchmarks.fp8_weights import fp8_weights
from benchmarks.kinds import Kind
from benchmarks.shapes import COPY_BYTES_PER_S, SHAPES, random_pair
from benchmarks.synthetic import DrawnAcceptance, decide
from specdec.acceptance.packed import Outcome
from specdec.errors import SpecdecWarning
from tests.specdec.execution.test_graphs import FixedPlaceBackend, Replayed, graphs_on_cpu, recorded_on_cpu  # noqa: F401


def test_every_read_is_noted_and_stays_as_it_is() -> None:
    read = Moments()
    real = Outcome(np.array([2, 0]), np.zeros((2, 4), np.int64), np.zeros((2, 3), np.int64))
    assert read.note(real, np.array([3, 0])) is real
    ((_, rows, tokens),) = read.found
    assert (rows, tokens) == (2, 4)


@pytest.mark.parametrize(
    ("kind", "sampled"),
    [
        (Kind(), [False] * 4),
        (Kind(True), [True] * 4),
        (Kind(True, 0.5), [True, False, True, False]),
        (Kind(True, 1.0), [False] * 4),
    ],
)
def test_sampled_rows_of_a_batch(kind: Kind, sampled: list[bool]) -> None:
    params = kind.params(4, 9)
    assert [not p.greedy for p in params] == sampled
    assert all((p.temperature, p.top_p) == (0.8, 0.95) for p in params if not p.greedy)
    assert all(p.ignore_eos and p.max_new_tokens == 9 for p in params)


class Rows:
    """A model whose rows take one and four tokens a round, with K = 3."""

    config = SimpleNamespace(num_speculative_tokens=3)

    def __init__(self, read: Moments) -> None:
        self.read = read

    def stream(self, ids: list[list[int]], params: list[Any]) -> Iterator[Any]:
        left = np.array([p.max_new_tokens for p in params])
        while left.any():
            rows = np.flatnonzero(left)
            self.read.found.append((0.0, len(rows), 0))
            for row in rows:
                took = min(4 if row else 1, left[row])
                left[row] -= took
                yield SimpleNamespace(index=row, token_ids=[0] * took)


@pytest.mark.parametrize(("new_tokens", "rounds"), [(256, 30), (128, 26), (60, 9)])
def test_rounds_end_before_a_row_comes_to_its_last_token(new_tokens: int, rounds: int) -> None:
    read = Moments()
    with full_rounds(Rows(read), read, [[1], [1]], Kind().params(2, new_tokens)) as go_on:  # type: ignore[arg-type]
        assert go_on(30) == rounds
    assert all(rows == 2 for _, rows, _ in read.found) and len(read.found) * 4 <= new_tokens


def test_too_few_tokens_for_full_rounds_are_refused() -> None:
    read = Moments()
    made = full_rounds(Rows(read), read, [[1], [1]], Kind().params(2, 40))  # type: ignore[arg-type]
    with made as go_on, pytest.raises(ValueError, match="40 new tokens leave 4 rounds of 2 decoding rows"):
        go_on(30)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_floor_of_uneven_rows_counts_every_key() -> None:
    """Of one long row beside short ones it is that of the weights, and of all rows' keys and values."""
    pair, drafts = random_pair("tiny", torch.float32, torch.device("cpu")), 3
    rows = [[1] * 9000, [1] * 37, [1] * 44]
    experts = pair.experts(rows, drafts, 20)
    of_target, of_head = pair.cache_bytes
    keys = sum(len(row) - 10 for row in rows)
    more = floor(pair, rows, drafts, 20)["floor_ms"] - pair.floor_ms(3, drafts, 0, experts)
    assert more == pytest.approx(1e3 * keys * (of_target + drafts * of_head) / COPY_BYTES_PER_S)


@pytest.mark.slow
@pytest.mark.thorough
def test_several_drafts_of_a_hybrid_on_the_cpu(tmp_path: Path) -> None:
    """From the command line: a line for each K and batch, in order, and why there are no graphs."""
    out = tmp_path / "round.jsonl"
    options = "--shape tiny-qwen3.5 --device cpu --drafts 0,3 --rows 1,2 --prompt 5 9 --new-tokens 25 --repeats 1"
    kind = "--acceptance 1 --sampled --greedy-share 0.5"
    done = CliRunner().invoke(main, [*options.split(), *kind.split(), "--out", str(out)])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["drafts"], line["rows"]) for line in lines] == [(0, 1), (0, 2), (3, 1), (3, 2)]
    assert [line["tokens_a_round"] for line in lines] == [1, 2, 4, 8]
    assert all(Kind.of(line) == Kind(True, 0.5) for line in lines) and "rows=2, 50% greedy" in done.output
    assert all(line["graphs"] == "off: backend 'torch' has none" for line in lines) and "graphs off" in done.output
    assert all("by_events" not in line and line["over_floor"] > 1 for line in lines)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_long_row_beside_a_short_one_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the shape's configuration allows."""
    small = SHAPES["tiny-qwen3.5"]()
    small.max_position_embeddings = 100
    monkeypatch.setitem(SHAPES, "tiny-qwen3.5", lambda: small)
    out = tmp_path / "round.jsonl"
    options = "--shape tiny-qwen3.5 --device cpu --drafts 1 --rows 2 --prompt 5 9 --long 90 --new-tokens 48 --repeats 1"
    done = CliRunner().invoke(main, [*options.split(), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert [json.loads(line)["long"] for line in out.read_text().splitlines()] == [90]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*runs on a CPU")
def test_weights_in_fp8_on_the_cpu(tmp_path: Path) -> None:
    """The floor counts a byte a weight of the layers, and two of the lm_head's; the head is as it was."""
    plain, pair = (random_pair("tiny", torch.bfloat16, torch.device("cpu"), weights) for weights in ("model", "fp8"))
    weights = sum(m.weight.numel() for m in plain.target.get_decoder().modules() if isinstance(m, torch.nn.Linear))
    assert fp8_weights(pair.target) == (weights, weights // 128**2) and fp8_weights(plain.target) == (0, 0)
    out = tmp_path / "round.jsonl"
    options = "--shape tiny --weights fp8 --device cpu --drafts 0 --rows 2 --prompt 5 9 --new-tokens 12 --repeats 1"
    done = CliRunner().invoke(main, [*options.split(), "--out", str(out)])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["drafts"], line["weights"]) for line in lines] == [(0, "fp8")]
    experts = plain.experts([[1] * 12] * 2, 0, 12)
    saved = plain.floor_ms(2, 0, 13, experts) - lines[0]["floor_ms"]
    assert saved == pytest.approx(1e3 * (weights - 4 * weights // 128**2) / COPY_BYTES_PER_S, rel=0.05)
    with pytest.raises(ValueError, match="128 does not divide a weight"):
        random_pair("tiny-deepseek", torch.bfloat16, torch.device("cpu"), "fp8")


@pytest.mark.parametrize("option", [("--backend", "flashinfer"), ("--trace", "1")])
def test_what_needs_a_gpu_is_refused_on_the_cpu(option: tuple[str, str], tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["--device", "cpu", *option, "--out", str(tmp_path / "x")])
    assert done.exit_code == 2 and f"{option[0]} {option[1]} needs a GPU" in done.output


@pytest.mark.slow
@pytest.mark.thorough
def test_a_hybrid_without_graphs_is_measured_and_says_so(
    graphs_on_cpu: list[Replayed],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a backend with graphs, and with states that torch functions compute."""
    cpu = torch.device("cpu")
    monkeypatch.setattr("specdec.loading.parts.make_backend", lambda name, device: FixedPlaceBackend(device))
    pair, sizes = random_pair("tiny-qwen3.5", torch.float32, cpu), sizes_of(1, [3], 64, 48, None)
    graphs = graphs_of(pair, "flashinfer")
    with pytest.warns(SpecdecWarning, match="no CUDA graph"), wrapped(pair, 1, cuda_graphs=graphs, **sizes) as model:
        decide(model, DrawnAcceptance(1, 512, np.random.default_rng(0), cpu))
        read = Moments()
        model.engine.executor.reads.after_read = read.note
        found = measured(model, read, pair, [[1, 2, 3]], Kind(), 40, 1)
    assert model.graphs.startswith("off: recurrent layers") and "by_events" not in found


@pytest.mark.slow
@pytest.mark.thorough
def test_graphs_are_required_of_a_plain_target() -> None:
    plain, hybrid = (random_pair(shape, torch.float32, torch.device("cpu")) for shape in ("tiny", "tiny-qwen3.5"))
    assert [graphs_of(plain, "flashinfer"), graphs_of(hybrid, "flashinfer")] == [True, "auto"]
    assert graphs_of(plain, "torch") == "auto"
