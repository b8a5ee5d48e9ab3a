"""Checkpoints with drawn weights: each tensor follows from its name, and ranks cut their shares out of the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors
import torch
from transformers.models.auto import AutoModelForCausalLM

from benchmarks import drawn_weights, parallel_shapes
from benchmarks.bench_parallel import Words, open_model
from benchmarks.drawn_weights import draw, in_every_rank, open_drawn, write_drawn
from specdec.model import SpeculativeModel


@pytest.fixture(autouse=True)
def in_this_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every module opens files as before when the test is over, and ranks are started as before."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = [(m, vars(m)["safe_open"]) for m in list(sys.modules.values()) if "safe_open" in vars(m)]
    yield
    for module, opened in before:
        module.safe_open = opened  # type: ignore[attr-defined]


def test_a_file_keeps_vectors_and_draws_matrices(tmp_path: Path) -> None:
    """The disk holds no matrix."""
    shapes = {"a": ((700, 1000), 0.02), "b": ((300, 40), 1.0)}
    write_drawn(tmp_path, shapes, {"norm": torch.arange(5.0), "map": torch.tensor([3, 1])})
    (file,) = tmp_path.glob("*.safetensors")
    assert file.stat().st_size < 1000
    with open_drawn(file, framework="pt") as found:
        assert sorted(found.keys()) == ["a", "b", "map", "norm"]
        assert found.get_tensor("norm").tolist() == [0, 1, 2, 3, 4] and found.get_tensor("map").tolist() == [3, 1]
        a, b = found.get_tensor("a"), found.get_slice("b")
        assert a.dtype == torch.bfloat16 and list(a.shape) == found.get_slice("a").get_shape() == [700, 1000]
        assert abs(float(a.float().std()) - 0.02) < 1e-3 and abs(float(b[...].float().std()) - 1) < 0.05
        assert b.get_dtype() == "BF16" and found.get_slice("norm").get_dtype() == "F32"
        assert torch.equal(b[10:20, 3:9], draw("b", [300, 40], 1.0)[10:20, 3:9])
        assert not torch.equal(a[:300, :40], draw("b", [300, 40], 0.02))


def test_a_written_checkpoint_is_read_as_it_is(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.ones(2, 2)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    with open_drawn(tmp_path / "x.safetensors", framework="pt") as file:
        assert not isinstance(file, drawn_weights.DrawnFile) and file.get_tensor("x").tolist() == [[1, 1], [1, 1]]


def test_a_mixture_is_loaded_by_the_names_of_published_checkpoints(tmp_path: Path) -> None:
    in_every_rank()
    assert safetensors.safe_open is open_drawn
    target, draft = parallel_shapes.write_pair("tiny-deepseek-v3", 2, 8, tmp_path)
    assert parallel_shapes.write_pair("tiny-deepseek-v3", 2, 8, tmp_path) == (target, draft) and draft == "mtp"
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    own = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    name, half = "model.layers.1.mlp.experts.3.up_proj.weight", own.shape[1] // 2
    assert torch.equal(own[3, half:], draw(name, [half, own.shape[2]], 0.02))


@pytest.mark.long
@pytest.mark.parametrize(("shape", "layers", "drafts"), [("tiny-deepseek-v3", 2, 1), ("tiny", 8, 5)])
def test_two_ranks_are_one_model(tmp_path: Path, shape: str, layers: int, drafts: int) -> None:
    pytest.importorskip("accelerate")
    in_every_rank()
    target, draft = parallel_shapes.write_pair(shape, layers, 8, tmp_path)
    logits = []
    for size in (1, 2):
        with open_model(target, draft, size, drafts, [2], 64, "cpu") as model:
            assert isinstance(model, SpeculativeModel) and isinstance(model.tokenizer, Words)
            logits.append(model.own_logits(range(3, 20)))
    assert float(logits[0].std()) > 0.01
    assert torch.allclose(*logits, rtol=1e-3, atol=1e-3)
