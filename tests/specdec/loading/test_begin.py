"""What is begun before a target can run: its kernels and the compiler's processes, once its configuration is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import tiny_llama, wrap

import specdec.model
from specdec.errors import InvalidInputError
from specdec.loading.targets import open_target


@pytest.mark.parametrize("loaded", [True, False])
def test_the_configuration_is_told_before_the_model_runs(loaded: bool, tmp_path: Path) -> None:
    model, told = tiny_llama(), list[Any]()
    model.save_pretrained(tmp_path)

    def begin(config: Any, dtype: Any, device: torch.device) -> None:
        told.append((config.num_hidden_layers, dtype, device))

    if loaded:
        open_target(model, "auto", None, on_config=begin)
    else:
        open_target(tmp_path, torch.float32, "cpu", on_config=begin)
    assert told == [(4, torch.float32, torch.device("cpu"))]


def test_nothing_is_begun_for_a_target_that_is_refused() -> None:
    told: list[Any] = []
    with pytest.raises(InvalidInputError, match="is loaded already"):
        open_target(tiny_llama(), "float16", None, on_config=lambda *args: told.append(args))
    assert not told


def test_kernels_begin_to_be_built_before_the_model_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    probe = specdec.model.probe_target
    monkeypatch.setattr(specdec.model, "begin_kernels", lambda *args: order.append("kernels"))
    monkeypatch.setattr(specdec.model, "probe_target", lambda model: (order.append("probe"), probe(model))[1])
    wrap(tiny_llama()).close()
    assert order == ["kernels", "probe", "kernels"]  # the second time for what the layers themselves say
