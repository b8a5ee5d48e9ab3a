"""Loading a target reports what is unexpected, but not the module tensors that its class drops on purpose."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3ForCausalLM, Qwen2ForCausalLM

from specdec.errors import ModelLoadError
from tests.fakes import load_target

CPU = torch.device("cpu")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What transformers logs while a model is loaded."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler, logger = Keep(), logging.getLogger("transformers.modeling_utils")
    logger.addHandler(handler)
    yield messages  # type: ignore[misc]
    logger.removeHandler(handler)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "mimo", "ernie", "qwen3_next"])
def test_module_tensors_are_not_reported(
    name: str, report: list[str], tmp_path: Path, tiny_case: Callable[..., Any]
) -> None:
    load_target(tiny_case(name).write(tmp_path), torch.float32, CPU)
    assert report == []


def test_every_module_that_the_configuration_counts_is_expected(
    report: list[str], tmp_path: Path, tiny_case: Callable[..., Any]
) -> None:
    case = tiny_case("deepseek_v3", modules=2)
    load_target(case.write(tmp_path / "two", settings={"num_nextn_predict_layers": 2}), torch.float32, CPU)
    assert report == []
    load_target(case.write(tmp_path / "one", settings={"num_nextn_predict_layers": 1}), torch.float32, CPU)
    assert len(report) == 1 and "layers.5.enorm" in report[0] and "layers.4." not in report[0]


def test_everything_else_is_reported(report: list[str], tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    load_target(tiny_case("deepseek_v3").write(tmp_path, {"v_head.summary.weight": torch.zeros(2)}), torch.float32, CPU)
    (text,) = report
    assert "v_head.summary" in text and "UNEXPECTED" in text
    assert "layers.4." not in text


def test_what_the_model_would_lack_is_refused(tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    extra = {"model.layers.2.self_attn.indexer.weight": torch.zeros(2), "model.layers.1.input_layernorm.weight": None}
    with pytest.raises(
        ModelLoadError, match=r"1 tensor missing .*layers\.1\.input_layernorm.*layers\.2.*indexer"
    ) as error:
        load_target(tiny_case("deepseek_v3").write(tmp_path, extra), torch.float32, CPU)
    assert "layers.4." not in str(error.value)


@pytest.mark.slow
def test_the_model_class_is_as_before(tmp_path: Path, tiny_case: Callable[..., Any]) -> None:
    """As before a load of ours: transformers' own first load adds to the class."""
    kinds, cases = (DeepseekV3ForCausalLM, Qwen2ForCausalLM), [tiny_case(name) for name in ("deepseek_v3", "mimo")]
    folders = [case.write(tmp_path / str(i)) for i, case in enumerate(cases)]
    for kind, folder in zip(kinds, folders, strict=True):
        kind.from_pretrained(folder)

    def attributes() -> list[Any]:
        return [(k._keys_to_ignore_on_load_unexpected, dict(vars(k))) for k in kinds]

    before = attributes()
    for folder in folders:
        load_target(folder, torch.float32, CPU)
    assert attributes() == before
