"""The twin of a model: what it passes, what it names, and that building it leaves everything else alone."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import enlarge, tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM

import specdec.selftest.twin
from specdec.errors import UnsupportedModelError
from specdec.selftest.shrinking import Threshold
from specdec.selftest.twin import TwinReport, twin_test
from specdec.wrapped.probing import probe_target

pytestmark = pytest.mark.usefixtures("every_self_test")

FULL_SIZE = ["deepseek_v3", "gemma3", "gpt_oss", "qwen3_moe", "gemma4", "phi4_multimodal"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FULL_SIZE)
@pytest.mark.cases(1)
def test_the_twin_of_a_published_size_is_exact_and_quick(kind: str) -> None:
    """From class and configuration alone: the weights of the model itself are never built here."""
    config = AutoConfig.for_model(kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    started = time.perf_counter()
    report = twin_test(SimpleNamespace(model=model, calls=(), recurrence_specs=()), 100_000)  # type: ignore[arg-type]
    assert report.unbuilt is None
    assert time.perf_counter() - started < 10, "0.2 to 1 s on an idle core"


def test_the_report_in_words() -> None:
    assert str(TwinReport(())) == "exact"
    assert str(TwinReport((Threshold("sliding_window", 512),))) == "exact past sliding_window=512"
    assert str(TwinReport((), "no room")) == "none: no room"


def test_the_users_random_state_and_model_are_left_alone() -> None:
    model = tiny_llama()
    config, before = model.config.to_dict(), torch.random.get_rng_state()
    twin_test(probe_target(model), 100)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.config.to_dict() == config


def test_the_number_of_threads_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other thread that first uses torch meanwhile would keep another number for good."""
    given: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    model = tiny_llama()
    assert twin_test(probe_target(model), 128).unbuilt is None
    assert not given


def test_one_flipped_expert_is_forgiven_and_a_lasting_error_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding may flip an expert with one set of weights, hardly with two."""
    right, seeds = specdec.selftest.twin.enlarge, []

    def fill(twin: Any, seed: int) -> None:
        right(twin, seed)
        seeds.append(seed)

    def wrong(small: Any, max_model_len: int) -> str | None:
        return "is wrong" if seeds[-1] < first_right else None

    monkeypatch.setattr(specdec.selftest.twin, "enlarge", fill)
    monkeypatch.setattr(specdec.selftest.twin, "_wrong", wrong)
    first_right = 1
    assert twin_test(probe_target(tiny_llama()), 100).unbuilt is None
    first_right = 2
    with pytest.raises(UnsupportedModelError, match="a small copy of it is wrong"):
        twin_test(probe_target(tiny_llama()), 100)


def test_other_variants_of_attention_are_no_twin() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    config = AutoConfig.for_model("mistral", vocab_size=64, num_hidden_layers=2, sliding_window=8, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    enlarge(model)
    probed = probe_target(model)
    model.config.sliding_window = None
    assert "other variants of attention" in str(twin_test(probed, 100).unbuilt)
