"""What a module does by positions of its own is found out, and is put back after a forward of ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention.hf.model_specific import chunk_size_of, temperature_of, untuned
from attention.hf.patches import borrowed
from attention.spec import TemperatureTuning


def module(**attributes: Any) -> torch.nn.Module:
    found = torch.nn.Module()
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


def layer(types: list[str] | None, index: int, chunk_size: int | None) -> torch.nn.Module:
    return module(config=SimpleNamespace(layer_types=types, attention_chunk_size=chunk_size), layer_idx=index)


TYPES = ["chunked_attention", "full_attention"]
TUNED = {"attn_temperature_tuning": True, "use_rope": 0, "attn_scale": 0.1, "floor_scale": 8192}


def test_the_layers_own_type_decides_about_chunks() -> None:
    assert chunk_size_of(layer(TYPES, 0, 8192)) == 8192
    others = (layer(TYPES, 1, 8192), layer(None, 0, 8192), layer(TYPES, 0, None), torch.nn.Linear(1, 1))
    assert [chunk_size_of(other) for other in others] == [None] * 4


def test_only_layers_without_rotary_embedding_are_tuned() -> None:
    assert temperature_of(module(**TUNED)) == TemperatureTuning(0.1, 8192.0)
    assert temperature_of(module(**{**TUNED, "use_rope": 1})) is None
    assert temperature_of(module(**{**TUNED, "attn_temperature_tuning": False})) is None
    assert temperature_of(torch.nn.Linear(1, 1)) is None


def test_tuning_is_off_for_one_forward_only() -> None:
    modules = [module(**TUNED), module(**{**TUNED, "attn_temperature_tuning": 4})]
    with pytest.raises(RuntimeError), borrowed(untuned(modules)):
        assert [m.attn_temperature_tuning for m in modules] == [False, False]
        raise RuntimeError
    assert [m.attn_temperature_tuning for m in modules] == [True, 4]
