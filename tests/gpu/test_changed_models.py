"""A model changed between calls, on a GPU: what graphs have built in is refused, and hooks run without graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from specdec import InvalidInputError, ModelChangedError, SamplingParams, SpecdecWarning, SpeculativeModel
from specdec.loading.names import builtin_names

pytestmark = pytest.mark.skipif("gsm-llama" not in builtin_names(), reason="no built-in targets")
SIZES: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 512, "kv_cache_tokens": 4096, "num_speculative_tokens": 5}
PROMPT = "A farmer has 12 hens. Each lays 3 eggs a day. How many eggs in a week?"
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
Undo = Callable[[], Any]


def loaded(dtype: str = "float32") -> Any:
    with SpeculativeModel.from_pretrained("gsm-llama", "auto", dtype=dtype, device="cuda", backend="torch") as model:
        return model.hf_model, model.tokenizer, model.head


def own_text(model: Any, tokenizer: Any) -> list[int]:
    ids = torch.tensor([tokenizer.encode(PROMPT)], device=model.device)
    with torch.no_grad():
        endless = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": -1}
        given = model.generate(ids, attention_mask=torch.ones_like(ids), **endless)
    return given[0, ids.shape[1] :].tolist()


def int_attribute(model: Any) -> Undo:
    config = model.model.layers[1].mlp
    before = config.intermediate_size
    config.intermediate_size = before + 1
    return lambda: setattr(config, "intermediate_size", before)


def class_patch(model: Any) -> Undo:
    kind = type(model.model.layers[0].mlp)
    before = kind.forward
    kind.forward = lambda self, x: 0.5 * before(self, x)
    return lambda: setattr(kind, "forward", before)


def new_hook(model: Any) -> Undo:
    return model.model.layers[1].register_forward_pre_hook(lambda module, arguments: None).remove


def hook_of_every_module(model: Any) -> Undo:
    return register_module_forward_hook(lambda module, arguments, output: None).remove


def new_forward(model: Any) -> Undo:
    module = model.model.layers[1].mlp
    own = type(module).forward
    module.forward = lambda x: 0.5 * own(module, x)
    return lambda: vars(module).pop("forward")


def new_buffer(model: Any) -> Undo:
    rotary = model.model.rotary_emb
    before, rotary.inv_freq = rotary.inv_freq, 0.5 * rotary.inv_freq
    return lambda: setattr(rotary, "inv_freq", before)


CHANGES = (int_attribute, class_patch, new_hook, hook_of_every_module, new_forward, new_buffer)


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_graphs_refuse_what_they_have_built_in(dtype: str) -> None:
    sizes = {**SIZES, "dtype": dtype, "cuda_graphs": True}
    with SpeculativeModel.from_pretrained("gsm-llama", "auto", device="cuda", **sizes) as model:
        before = model.generate(PROMPT, GREEDY)[0].token_ids
        for change in CHANGES:
            undo = change(model.hf_model)
            try:
                with pytest.raises(ModelChangedError):
                    model.generate(PROMPT, GREEDY)
            finally:
                undo()
            assert model.generate(PROMPT, GREEDY)[0].token_ids == before, change.__name__
        own_text(model.hf_model, model.tokenizer)  # a forward of the user's changes nothing
        assert model.generate(PROMPT, GREEDY)[0].token_ids == before


def test_a_hook_at_loading_runs_without_graphs_and_its_strength_counts() -> None:
    model, tokenizer, head = loaded()
    strength = {"now": 0.0}

    def steer(module: nn.Module, arguments: Any, output: Any) -> Any:
        states = output[0] if isinstance(output, tuple) else output
        steered = states + strength["now"] * torch.linspace(-1, 1, states.shape[-1], device=states.device)
        return (steered, *output[1:]) if isinstance(output, tuple) else steered

    model.model.layers[1].register_forward_hook(steer)
    sizes = {**SIZES, "tokenizer": tokenizer, "backend": "torch"}
    with pytest.raises(InvalidInputError, match=r"the model has a forward hook on model.layers.1"):
        SpeculativeModel.from_pretrained(model, head, **{**sizes, "backend": "auto", "cuda_graphs": True})
    texts = []
    with SpeculativeModel.from_pretrained(model, head, **sizes) as wrapped:
        for strength["now"] in (0.0, 1.0, 0.0):
            if not texts:
                with pytest.warns(SpecdecWarning, match="within one call alone"):
                    texts.append(wrapped.generate(PROMPT, GREEDY)[0].token_ids)
            else:
                texts.append(wrapped.generate(PROMPT, GREEDY)[0].token_ids)
            assert texts[-1] == own_text(model, tokenizer)
    assert texts[0] == texts[2] != texts[1]
