"""Targets that accelerate spreads over devices or offloads: served on one device, refused by name elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import hf_greedy, hooks_of, random_prompts, tiny_llama, wrap
from transformers import AutoModelForCausalLM

from specdec import SamplingParams
from specdec.errors import InvalidInputError

accelerate: Any = pytest.importorskip("accelerate", reason="accelerate is not installed: it comes with peft")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_llama().save_pretrained(folder)
    return folder


def dispatched(folder: Path, **how: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)


def forced(model: Any) -> Any:
    return accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)


HOOKED: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "cpu_offload": (lambda _, __: accelerate.cpu_offload(tiny_llama(), CPU), "AlignDevicesHook"),
    "disk_offload": (lambda _, to: accelerate.disk_offload(tiny_llama(), str(to), CPU), "AlignDevicesHook"),
    "cpu_offload_with_hook": (lambda _, __: accelerate.cpu_offload_with_hook(tiny_llama(), CPU)[0], "CpuOffload"),
    "a device_map with disk": (
        lambda folder, to: dispatched(
            folder,
            device_map={"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
            | {f"model.layers.{i}": "disk" if i == 3 else "cpu" for i in range(4)},
            offload_folder=str(to),
        ),
        "AlignDevicesHook.*its parts lie on cpu, disk",
    ),
    "hooks on one device": (lambda _, __: forced(tiny_llama()), "AlignDevicesHook"),
}


@pytest.mark.parametrize("name", HOOKED)
def test_hooks_are_refused_by_name_before_anything_is_changed(name: str, saved: Path, tmp_path: Path) -> None:
    make, words = HOOKED[name]
    model = make(saved, tmp_path)
    before = [(hooks_of(m), m.forward) for m in model.modules()], dict(vars(model.config))
    with pytest.raises(InvalidInputError, match=f"hooks of accelerate \\({words}.*load the model onto one device"):
        wrap(model)
    assert ([(hooks_of(m), m.forward) for m in model.modules()], dict(vars(model.config))) == before


@pytest.mark.slow
def test_a_device_map_of_one_device_is_served(saved: Path) -> None:
    prompts = random_prompts([5, 9])
    right = [hf_greedy(prompt, 8) for prompt in prompts]
    for device_map in ({"": "cpu"}, "cpu"):
        with wrap(dispatched(saved, device_map=device_map)) as wrapped:
            assert [c.token_ids for c in wrapped.generate(prompts, SamplingParams(max_new_tokens=8))] == right


@pytest.mark.slow
def test_without_its_hooks_it_is_served() -> None:
    model = forced(tiny_llama())
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    (prompt,) = random_prompts([5])
    with wrap(model) as wrapped:
        assert wrapped.generate(prompt, SamplingParams(max_new_tokens=8))[0].token_ids == hf_greedy(prompt, 8)
