"""That a wrapped model is unchanged is seen quickly, in graphs as well; whatever has changed is found and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import count_calls, tiny_llama
from torch import nn
from transformers import Gemma2Config
from transformers.models.auto import AutoModelForCausalLM

from attention.hf.patches import attention_implementation
from attention.hf.port import ATTENTION_NAME
from specdec.errors import ModelChangedError
from specdec.wrapped import changes
from specdec.wrapped.changes import LiveModel, WeightVersions, _Snapshot


def move(model: Any) -> None:
    weight = model.model.layers[2].mlp.up_proj.weight
    weight.data = weight.data.clone()


def recast(model: Any) -> None:
    weight = model.model.layers[1].input_layernorm.weight
    weight.data = weight.data.view(torch.bfloat16)[::2]  # in the same memory


def adapt(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.add_module("adapter", nn.Identity().eval())


def set_number(module: Callable[[Any], Any], name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(module(model), name, value)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "moved": (move, "other memory"),
    "recast": (recast, "bfloat16 on cpu"),
    "adapted": (adapt, "added, removed or replaced"),
    "resized": (lambda model: model.resize_token_embeddings(99, mean_resizing=False), r"have \(99, 99\) now"),
    "norm": (
        lambda model: setattr(model.model.layers[1].input_layernorm, "variance_epsilon", 0.1),
        r"^model.layers.1.input_layernorm.variance_epsilon was 1e-0\d when .* is 0.1 now; set it back",
    ),
    "scale": (lambda model: setattr(model.model.layers[0].self_attn, "scaling", 2.0), "self_attn.scaling was"),
    "mask": (lambda model: setattr(model.model.layers[0].self_attn, "is_causal", False), "is_causal was True"),
}


SERVED_BY_MODULES = ("moved", "norm")
"""What rounds without graphs use as it is now."""


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_named(change: str, captured: bool) -> None:
    model = tiny_llama()
    live = LiveModel.of(model, captured)
    live.check()
    alter, message = CHANGES[change]
    alter(model)
    if change in SERVED_BY_MODULES and not captured:
        live.check()
        return
    with pytest.raises(ModelChangedError, match=message):
        live.check()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_rounds_from_graphs_read_is_checked_first_and_all_else_after_it(change: str, captured: bool) -> None:
    model = tiny_llama()
    live = LiveModel.of(model, captured)
    assert (live.begin_check() is not None) == captured
    alter, message = CHANGES[change]
    alter(model)
    if not captured:
        if change in SERVED_BY_MODULES:
            assert live.begin_check() is None
            return
        with pytest.raises(ModelChangedError, match=message):
            live.begin_check()
    elif change in ("moved", "resized"):  # graphs would read what may be anybody's memory by now
        with pytest.raises(ModelChangedError, match=message):
            live.begin_check()
    else:
        rest = live.begin_check()
        assert rest is not None
        with pytest.raises(ModelChangedError, match=message):
            rest()


def test_a_number_that_forwards_read_from_the_configuration() -> None:
    """Masks and soft caps are made from it at every forward; what decides nothing there may change."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8, "vocab_size": 32}
    model = AutoModelForCausalLM.from_config(
        Gemma2Config(**sizes, num_key_value_heads=1, num_hidden_layers=2, sliding_window=20)
    ).eval()
    live = LiveModel.of(model, False)
    model.config.use_cache = False
    live.check()
    for attribute, value in (("sliding_window", 8), ("final_logit_softcapping", 5.0)):
        before = getattr(model.config, attribute)
        setattr(model.config, attribute, value)
        with pytest.raises(ModelChangedError, match=rf"^config\.{attribute} was {before} .* is {value} now"):
            live.check()
        setattr(model.config, attribute, before)
        live.check()


@pytest.mark.parametrize("captured", [False, True])
def test_of_a_model_with_new_values_only_the_snapshot_is_read(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    live = LiveModel.of(model, captured)
    model.load_state_dict(tiny_llama(seed=3).state_dict())
    slowly = count_calls(monkeypatch, changes, "_parts")
    live.check()
    assert not slowly
    live.model.model.layers[0].mlp.up_proj = nn.Linear(
        *model.model.layers[0].mlp.up_proj.weight.shape[::-1], bias=False
    )
    if captured:
        with pytest.raises(ModelChangedError, match="other memory"):
            live.check()
    else:
        live.check()
    assert slowly, "another linear layer of the same size is found by its identity, and allowed where no graph holds it"


def test_a_snapshot_without_addresses_would_miss_weights_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted."""
    plain = _Snapshot.of
    monkeypatch.setattr(_Snapshot, "of", lambda modules, captured: plain(modules, False))
    model = tiny_llama()
    live = LiveModel.of(model, captured=True)
    move(model)
    live.check()


def assign(model: Any) -> None:
    """`load_state_dict(assign=True)`, with other values."""
    model.load_state_dict({name: 2 * value for name, value in model.state_dict().items()}, assign=True)


def replace_linear(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.o_proj = nn.Linear(attention.o_proj.in_features, attention.o_proj.out_features, bias=False)


def replace_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = 2 * model.model.rotary_emb.inv_freq


def write_in_place(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(2)


def steer(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, arguments, output: 2 * output)


def other_values_behind_a_parameter(model: Any) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = 2 * weight.data


def set_forward(model: Any) -> None:
    own, mlp = type(model.model.layers[1].mlp).forward, model.model.layers[1].mlp
    mlp.forward = lambda states: 0.5 * own(mlp, states)


def same_buffer_anew(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()


CHANGED_WEIGHTS = [
    *(assign, replace_linear, replace_buffer, write_in_place, steer, same_buffer_anew),
    *(other_values_behind_a_parameter, set_forward),
]
IN_GRAPHS = {write_in_place}
"""What rounds from graphs see: these read the tensors that were there at the capture, and run no hooks."""


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("change", CHANGED_WEIGHTS)
def test_other_weights_are_noticed_once(change: Callable[[Any], None], captured: bool) -> None:
    model = tiny_llama()
    versions = WeightVersions(model, None, captured=captured)
    for _ in range(2):
        assert not versions.changed()
        change(model)
        seen = change is not same_buffer_anew and (change in IN_GRAPHS or not captured)
        assert versions.changed() == seen


def test_the_name_of_our_own_attention_is_no_change() -> None:
    """An interrupt may strike while a forward of ours puts the user's name back."""
    model = tiny_llama()
    live = LiveModel.of(model, captured=False)
    with attention_implementation((model.config,), ATTENTION_NAME):
        live.check()
    with (
        attention_implementation((model.config,), "own_attention"),
        pytest.raises(ModelChangedError, match="is 'own_attention' now"),
    ):
        live.check()
