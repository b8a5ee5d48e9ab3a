"""A model is changed between two calls: answers are those of the model as it is now, or the change is refused by name.

An episode fills the prefix cache of a tiny wrapped model, makes one of the changes, and asks again with K = 0 and
K = 5: greedy tokens are compared with transformers' `generate` of the changed model. Then the change is taken back,
where that can be done, and the first answers must come again.

`SPECDEC_RANDOM_EPISODES=2000 pytest tests/public/test_changed_models.py` tries so many; `SPECDEC_RANDOM_SEED` chooses
others.
"""

from __future__ import annotations

import copy
import functools
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize as parametrize
import transformers.models.llama.modeling_llama as llama_file
from fakes import TINY, backend_of_ours, eagle3_head, random_prompts, wrap
from torch import nn
from transformers import AutoConfig, LlamaConfig, MixtralConfig, Qwen3MoeConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto import AutoModelForCausalLM

from specdec import InvalidInputError, ModelChangedError, SamplingParams, SpecdecWarning, SpeculativeModel
from specdec.engine.engine import Engine
from specdec.execution.eager import EagerExecutor
from specdec.selftest.twin import enlarge
from specdec.wrapped import recorded
from tests.specdec.execution.test_graphs import (
    FixedPlaceBackend,
    graphs_on_cpu,  # noqa: F401
    recorded_on_cpu,  # noqa: F401
    with_graphs,
)

EPISODES = int(os.environ.get("SPECDEC_RANDOM_EPISODES", "32"))
SEED = int(os.environ.get("SPECDEC_RANDOM_SEED", "0"))
NEW = 5
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
Undo = Callable[[], Any]


class Lora(nn.Module):
    """A hand-written adapter over a linear layer, switched by a bool and scaled by an int."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.enabled, self.scaling, self.options = layer, False, 2, {"scale": 1}
        self.a = nn.Parameter(0.4 * torch.randn(4, layer.in_features))
        self.b = nn.Parameter(0.4 * torch.randn(layer.out_features, 4))
        self.offset = torch.zeros(layer.out_features)  # neither parameter nor buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x) + self.offset
        if self.enabled:
            out = out + (x @ self.a.T @ self.b.T) * self.scaling * self.options["scale"]
        return out


class Scaled(nn.Module):
    """A parametrization that does something once it is switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.factor


STRENGTH = {"steering": 0.0}


@dataclass
class Steering:
    """Hooks of the three kinds in which a user keeps a strength."""

    strength: float = 0.0

    def of_closure(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        return _plus(output, self.strength)

    def of_dict(self, module: nn.Module, arguments: Any, output: Any) -> Any:
        return _plus(output, STRENGTH["steering"])


def _plus(output: Any, strength: float) -> Any:
    states = output[0] if isinstance(output, tuple) else output
    steered = states + strength * torch.linspace(-1, 1, states.shape[-1])
    return (steered, *output[1:]) if isinstance(output, tuple) else steered


def attribute(owner: Callable[[Any], Any], name: str, value: Any) -> Callable[[Any, Any], Undo]:
    def change(model: Any, steering: Steering) -> Undo:
        module, before = owner(model), getattr(owner(model), name)
        setattr(module, name, value)
        return lambda: setattr(module, name, before)

    return change


def mlp(model: Any) -> Any:
    return model.model.layers[1].mlp


def lora(model: Any) -> Any:
    return next(module for module in model.modules() if isinstance(module, Lora))


def scaled(model: Any) -> Any:
    return next(module for module in model.modules() if isinstance(module, Scaled))


def in_place(model: Any, steering: Steering) -> Undo:
    weight = model.model.layers[1].self_attn.v_proj.weight
    before = weight.detach().clone()
    with torch.no_grad():
        weight.neg_()

    def undo() -> None:
        with torch.no_grad():
            weight.copy_(before)

    return undo


def assigned(model: Any, steering: Steering) -> Undo:
    layer = model.model.layers[2].self_attn.o_proj
    before, layer.weight = layer.weight, nn.Parameter(-layer.weight.detach())
    return lambda: setattr(layer, "weight", before)


def data_assigned(model: Any, steering: Steering) -> Undo:
    weight = model.model.layers[0].self_attn.k_proj.weight
    before, weight.data = weight.data, 1.5 * weight.data
    return lambda: setattr(weight, "data", before)


def hook_strength(model: Any, steering: Steering) -> Undo:
    steering.strength = 2.0
    return lambda: setattr(steering, "strength", 0.0)


def dict_strength(model: Any, steering: Steering) -> Undo:
    STRENGTH["steering"] = 2.0
    return lambda: STRENGTH.update(steering=0.0)


def new_hook(model: Any, steering: Steering) -> Undo:
    return model.model.layers[1].register_forward_hook(lambda m, a, output: _plus(output, 1.0)).remove


def new_pre_hook(model: Any, steering: Steering) -> Undo:
    return mlp(model).register_forward_pre_hook(lambda m, arguments: (1.7 * arguments[0],)).remove


def global_hook(model: Any, steering: Steering) -> Undo:
    def hook(module: nn.Module, arguments: Any, output: Any) -> Any:
        return 0.6 * output if module is model.model.layers[0].mlp else None

    return nn.modules.module.register_module_forward_hook(hook).remove


def class_patch(model: Any, steering: Steering) -> Undo:
    kind = type(mlp(model))
    before = kind.forward
    kind.forward = lambda self, *given: 0.7 * before(self, *given)
    return lambda: setattr(kind, "forward", before)


def norm_patch(model: Any, steering: Steering) -> Undo:
    kind = type(model.model.norm)
    before = kind.forward
    kind.forward = lambda self, states: 1.3 * before(self, states)
    return lambda: setattr(kind, "forward", before)


def file_function(model: Any, steering: Steering) -> Undo:
    before = llama_file.rotate_half
    llama_file.rotate_half = lambda x: -before(x)
    return lambda: setattr(llama_file, "rotate_half", before)


def instance_forward(model: Any, steering: Steering) -> Undo:
    module = mlp(model)
    own = type(module).forward
    module.forward = lambda *given: 0.5 * own(module, *given)
    return lambda: vars(module).pop("forward")


def lora_options(model: Any, steering: Steering) -> Undo:
    adapter = lora(model)
    adapter.enabled, adapter.options["scale"] = True, 3

    def undo() -> None:
        adapter.enabled, adapter.options["scale"] = False, 1

    return undo


def lora_offset(model: Any, steering: Steering) -> Undo:
    lora(model).offset.add_(torch.linspace(-1, 1, len(lora(model).offset)))
    return lora(model).offset.zero_


def new_parametrization(model: Any, steering: Steering) -> Undo:
    layer = model.model.layers[3].self_attn.o_proj
    parametrization = Scaled()
    parametrization.factor = -1
    parametrize.register_parametrization(layer, "weight", parametrization)
    return lambda: parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)


def replaced_layer(model: Any, steering: Steering) -> Undo:
    owner = model.model.layers[2].self_attn
    before, other = owner.o_proj, copy.deepcopy(owner.o_proj)
    with torch.no_grad():
        other.weight.neg_()
    owner.o_proj = other
    return lambda: setattr(owner, "o_proj", before)


def buffer_assigned(model: Any, steering: Steering) -> Undo:
    rotary = model.model.rotary_emb
    before, rotary.inv_freq = rotary.inv_freq, 0.3 * rotary.inv_freq
    return lambda: setattr(rotary, "inv_freq", before)


def training(model: Any, steering: Steering) -> Undo:
    model.train()
    return model.eval


def recast(model: Any, steering: Steering) -> Undo:
    model.to(torch.float64)
    return lambda: model.to(torch.float32)


def resized(model: Any, steering: Steering) -> None:
    model.resize_token_embeddings(model.config.vocab_size + 3, mean_resizing=False)


def fewer_layers(model: Any, steering: Steering) -> Undo:
    before = model.config.num_hidden_layers
    model.config.num_hidden_layers = 3
    return lambda: setattr(model.config, "num_hidden_layers", before)


def moved(model: Any, steering: Steering) -> None:
    model.to("meta")


def harmless(model: Any, steering: Steering) -> Undo:
    model.config.use_cache, model.config.pad_token_id = False, 3

    def undo() -> None:
        model.config.use_cache, model.config.pad_token_id = True, None

    return undo


ANY = ("llama", "mixtral", "qwen3_moe")
CHANGES: dict[str, tuple[Callable[[Any, Steering], Undo | None], tuple[str, ...]]] = {
    "weight in place": (in_place, ANY),
    "weight assigned": (assigned, ANY),
    "weight.data assigned": (data_assigned, ANY),
    "buffer assigned": (buffer_assigned, ANY),
    "layer replaced": (replaced_layer, ANY),
    "strength in a closure": (hook_strength, ("hooked",)),
    "strength in a dict": (dict_strength, ("hooked",)),
    "hook added": (new_hook, ANY),
    "pre-hook added": (new_pre_hook, ANY),
    "hook of every module": (global_hook, ANY),
    "class patched": (class_patch, ANY),
    "norm's class patched": (norm_patch, ANY),
    "function of the file patched": (file_function, ("llama",)),
    "forward set": (instance_forward, ANY),
    "parametrization switched": (attribute(scaled, "factor", 3), ("parametrized",)),
    "parametrization added": (new_parametrization, ANY),
    "adapter switched": (attribute(lora, "enabled", True), ("adapted",)),
    "adapter's dict": (lora_options, ("adapted",)),
    "adapter's tensor": (lora_offset, ("adapted",)),
    "adapter's int": (attribute(lora, "scaling", 9), ("switched on",)),
    "top_k of a router": (lambda m, s: attribute(lambda m: _router(m), "top_k", 1)(m, s), ("mixtral", "qwen3_moe")),
    "norm_topk_prob": (attribute(lambda m: mlp(m).gate, "norm_topk_prob", True), ("qwen3_moe",)),
    "epsilon of a norm": (attribute(lambda m: m.model.layers[1].input_layernorm, "variance_epsilon", 0.7), ANY),
    "scale of attention": (attribute(lambda m: m.model.layers[1].self_attn, "scaling", 1), ANY),
    "causality": (attribute(lambda m: m.model.layers[1].self_attn, "is_causal", False), ANY),
    "configured layers": (fewer_layers, ANY),
    "training mode": (training, ANY),
    "other dtype": (recast, ANY),
    "other device": (moved, ANY),
    "other vocabulary": (resized, ANY),
    "nothing that forwards read": (harmless, ANY),
}
FOR_GOOD = {"other device", "other vocabulary", "parametrization added", "other dtype"}
"""What is not taken back, or not exactly."""
REFUSED = {
    *("scale of attention", "causality", "configured layers", "other dtype", "other device"),
    *("other vocabulary", "parametrization added"),
}
"""What rounds do not read again. All else is served by rounds without graphs."""


def _router(model: Any) -> Any:
    return mlp(model).gate


SCALES = {"embed_tokens": 50, "o_proj": 10, "v_proj": 14, "q_proj": 14, "k_proj": 14}


@functools.cache
def _made(kind: str) -> Any:
    """Answers depend on what is attended to, so that stale pages show."""
    torch.manual_seed(7)
    sizes = {**TINY, "vocab_size": 53}
    if kind == "mixtral":
        config: Any = MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    elif kind == "qwen3_moe":
        config = Qwen3MoeConfig(
            **sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=False
        )
    else:
        config = LlamaConfig(**sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(SCALES.get(name.split(".")[-2], 8))
    return model


def made(kind: str, steering: Steering) -> Any:
    """A model of this kind; of Llamas also with a hook, a hand-written adapter, or a parametrization."""
    model = copy.deepcopy(_made("llama" if kind not in ANY else kind))
    layer = model.model.layers[1]
    if kind == "hooked":
        layer.register_forward_hook(steering.of_closure)
        layer.mlp.register_forward_hook(steering.of_dict)
    elif kind in ("adapted", "switched on"):
        torch.manual_seed(3)
        layer.mlp.up_proj = Lora(layer.mlp.up_proj).eval().requires_grad_(False)
        layer.mlp.up_proj.enabled = kind == "switched on"
    elif kind == "parametrized":
        parametrize.register_parametrization(layer.self_attn.o_proj, "weight", Scaled())
    return model.eval()


PREFIX = random_prompts((29,), 5, 53)[0]
PROMPTS = [[*PREFIX, *rest] for rest in random_prompts((1, 6, 3), 6, 53)]


@torch.no_grad()
def own_answers(model: Any) -> list[list[int]]:
    given = {"max_new_tokens": NEW, "do_sample": False, "use_cache": False}
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    return [model.generate(i, attention_mask=torch.ones_like(i), **given)[0, i.shape[1] :].tolist() for i in ids]


@dataclass
class Wrapped:
    """A model of one kind over many episodes, and what it says unchanged."""

    model: Any
    steering: Steering
    speculative: SpeculativeModel
    before: list[list[int]]

    @classmethod
    def of(cls, kind: str, **options: Any) -> Wrapped:
        steering = Steering()
        model = made(kind, steering)
        speculative = wrap(model, eagle3_head(model), num_speculative_tokens=5, max_num_batched_tokens=64, **options)
        return cls(model, steering, speculative, own_answers(model))

    def answers(self, num_drafts: int) -> list[list[int]]:
        params = replace(GREEDY, num_speculative_tokens=num_drafts)
        return [completion.token_ids for completion in self.speculative.generate(PROMPTS, params)]

    def episode(self, change: str) -> tuple[str, int]:
        """Raises AssertionError where a stale answer comes out.

        Returns:
            "served" or "refused", and how many answers the change has changed.
        """
        assert self.answers(5) == self.before, "before the change"
        undo, outcome, different = CHANGES[change][0](self.model, self.steering), "served", 0
        try:
            found = [self.answers(0), self.answers(5)]
            now = own_answers(self.model)
            assert found == [now, now], f"stale: {change}"
            different = sum(a != b for a, b in zip(self.before, now, strict=True))
        except ModelChangedError:
            outcome = "refused"
        finally:
            if undo is not None:
                undo()
        if change not in FOR_GOOD:
            assert self.answers(5) == self.before, f"stale: {change}, taken back"
        return outcome, different


class Models:
    """One of each kind, made when it is first needed, and again after a change that cannot be taken back."""

    def __init__(self) -> None:
        self._made: dict[str, Wrapped] = {}

    def episode(self, change: str, kind: str) -> tuple[str, int]:
        """See `Wrapped.episode`."""
        if kind not in self._made:
            self._made[kind] = Wrapped.of(kind)
        found = self._made[kind].episode(change)
        if change in FOR_GOOD:
            self._made.pop(kind).speculative.close()
        return found

    def close(self) -> None:
        for wrapped in self._made.values():
            wrapped.speculative.close()


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    found = Models()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecdecWarning)
        yield


def drawn(number: int) -> tuple[str, str]:
    """Every change comes up before any comes up twice."""
    draw = random.Random(SEED * 1_000_003 + number // len(CHANGES))
    change = draw.sample(list(CHANGES), len(CHANGES))[number % len(CHANGES)]
    kinds = CHANGES[change][1]
    return change, kinds[random.Random(SEED + number).randrange(len(kinds))]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
@pytest.mark.thorough
def test_answers_are_those_of_the_model_as_it_is_now(part: int, models: Models) -> None:
    different = 0
    for number in range(part, EPISODES, 2):
        change, kind = drawn(number)
        outcome, of_episode = models.episode(change, kind)
        assert outcome == ("refused" if change in REFUSED else "served"), f"{change} of {kind}"
        different += of_episode
    assert different > EPISODES // 2, "changes that change nothing would find nothing"


NOT_OF_PACKED = {"weight.data assigned", *FOR_GOOD}
"""Packed weights take new values in place of new tensors, and keep their dtype and place."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "adapted", "hooked", "qwen3_moe"])
@pytest.mark.thorough
def test_recorded_steps_are_those_of_the_model_as_it_is_now(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "_LIVE_STEPS", 0)
    wrapped = Wrapped.of(kind, cpu_linears="packed", enable_prefix_caching=False)
    with wrapped.speculative as speculative:
        assert wrapped.answers(0) == wrapped.before
        assert any(shape.is_checked for shape in speculative.target.steps.shapes.values()) == (kind != "hooked")
        for change, (_, kinds) in CHANGES.items():
            if kind in kinds and change not in NOT_OF_PACKED:
                outcome, _ = wrapped.episode(change)
                assert outcome == ("refused" if change in REFUSED else "served"), change


@pytest.mark.parametrize(
    ("change", "kind"),
    [("strength in a closure", "hooked"), ("adapter's int", "switched on"), ("class patched", "llama")],
)
@pytest.mark.cases(1)
def test_pages_that_outlive_a_change_are_seen(change: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the cache is kept whatever has changed."""
    monkeypatch.setattr(Engine, "check_weights", lambda self: None)
    wrapped = Wrapped.of(kind)
    with wrapped.speculative, pytest.raises(AssertionError, match=f"stale: {change}"):
        wrapped.episode(change)


def test_what_nobody_can_see_ends_the_epoch_of_the_prefix_cache() -> None:
    """Pages are found within a call, and by later calls only where the user says that they may be."""
    model = made("hooked", Steering())
    params = replace(GREEDY, num_speculative_tokens=0)
    with wrap(model, None) as wrapped, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            completions = wrapped.generate(PROMPTS, params)
            assert [c.stats.cached_tokens for c in completions] == [0, 28, 28]
        said = [str(w.message) for w in caught if issubclass(w.category, SpecdecWarning)]
        assert wrapped.describe()["prefix_caching"].startswith("within each call: a forward hook on model.layers.1 (")
        assert len(said) == 1 and "Steering.of_closure" in said[0] and "enable_prefix_caching=True" in said[0]
    with wrap(model, None, enable_prefix_caching=True) as wrapped:
        wrapped.generate(PROMPTS, params)
        assert [c.stats.cached_tokens for c in wrapped.generate(PROMPTS, params)] == [28, 32, 28]
        assert wrapped.describe()["prefix_caching"] == "on"


def test_an_attention_function_that_rounds_would_not_call_is_refused() -> None:
    model = made("llama", Steering())
    with wrap(model, None) as wrapped:
        model.set_attn_implementation("eager")
        wrapped.generate(PROMPTS[0], GREEDY)
        ALL_ATTENTION_FUNCTIONS.register("own_attention", ALL_ATTENTION_FUNCTIONS["sdpa"])
        model.set_attn_implementation("own_attention")
        with pytest.raises(ModelChangedError, match="'own_attention'"):
            wrapped.generate(PROMPTS[0], GREEDY)


IN_GRAPHS = {"weight in place", "training mode", "nothing that forwards read"}
"""What graphs serve: they read the weights' memory."""


FOR_GOOD_IN_GRAPHS = {*FOR_GOOD, "adapter's tensor"}
"""torch counts what is written to a tensor, so that it was written back is not seen."""


def refused(wrapped: Wrapped, change: str) -> bool:
    """Whether such a change is refused; it is taken back, and what was said before is said again."""
    undo = CHANGES[change][0](wrapped.model, wrapped.steering)
    try:
        wrapped.answers(5)
    except ModelChangedError:
        return True
    finally:
        if undo is not None:
            undo()
        if change not in FOR_GOOD_IN_GRAPHS:
            assert wrapped.answers(5) == wrapped.before, change
    return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.long), "adapted"])
def test_rounds_from_graphs_refuse_what_they_have_built_in(kind: str, graphs_on_cpu: Any) -> None:  # noqa: F811
    """Emulated graphs call modules; so not with fewer layers, which they miss before the check is made."""
    model = made(kind, Steering())
    sizes = {"num_speculative_tokens": 5, "max_num_batched_tokens": 64, "kv_cache_tokens": 900}
    with with_graphs(eagle3_head(model), model, **sizes) as speculative:
        wrapped = Wrapped(model, Steering(), speculative, own_answers(model))
        assert speculative.graphs == "on" and wrapped.answers(5) == wrapped.before
        changes = [change for change, (_, kinds) in CHANGES.items() if kind in kinds and change != "configured layers"]
        changes.sort(key=FOR_GOOD_IN_GRAPHS.__contains__)
        changes = changes[: len(changes) - len(FOR_GOOD_IN_GRAPHS.intersection(changes)) + 1]
        found = {change for change in changes if not refused(wrapped, change)}
    assert found == IN_GRAPHS.intersection(changes)


@pytest.mark.parametrize("kind", ["hooked", "patched"])
@pytest.mark.cases(1)
def test_no_graphs_are_captured_over_what_nobody_can_see(kind: str, graphs_on_cpu: Any) -> None:  # noqa: F811
    """A forward of the user's may read any variable, as a hook may."""
    model = made("llama" if kind == "patched" else kind, Steering())
    if kind == "patched":
        own = type(mlp(model)).forward
        mlp(model).forward = lambda *given: own(mlp(model), *given)
    reason = "forward hook on model.layers.1 (" if kind == "hooked" else "forward set on model.layers.1.mlp ("
    with pytest.raises(InvalidInputError, match=re.escape(f"cuda_graphs=True: the model has a {reason}")):
        with_graphs(eagle3_head(model), model)
    with (
        backend_of_ours(FixedPlaceBackend(torch.device("cpu"))),
        wrap(model, eagle3_head(model), num_speculative_tokens=5) as wrapped,
    ):
        assert wrapped.graphs.startswith(f"off: the model has a {reason}")
        assert isinstance(wrapped.engine.executor, EagerExecutor)
        assert wrapped.generate(PROMPTS[0], GREEDY)[0].token_ids == own_answers(model)[0]


def mla_model() -> Any:
    torch.manual_seed(1)
    ranks = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    sizes = {**TINY, "vocab_size": 53, "num_key_value_heads": 4, "head_dim": 8, "num_hidden_layers": 2, **ranks}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("minicpm3", **sizes)).eval()
    enlarge(model)
    return model


def new_hook_function(package: str) -> Any:
    def hook(module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return 2 * output

    hook.__module__ = package
    return hook


def test_a_projection_that_absorbed_rounds_do_not_call() -> None:
    """A hook that is there at loading is called; a later one would not be."""
    steering = Steering(1.0)
    model = mla_model()
    model.model.layers[0].self_attn.kv_b_proj.register_forward_hook(steering.of_closure)
    with wrap(model, None) as wrapped:
        for steering.strength in (1.0, 3.0):
            found = [completion.token_ids for completion in wrapped.generate(PROMPTS, GREEDY)]
            assert found == own_answers(model)
        of_library = new_hook_function("accelerate.hooks")
        for hook in (steering.of_closure, of_library):
            handle = model.model.layers[1].self_attn.kv_b_proj.register_forward_hook(hook)
            with pytest.raises(ModelChangedError, match=r"a forward hook on model.layers.1.self_attn.kv_b_proj"):
                wrapped.generate(PROMPTS, GREEDY)
            handle.remove()
        assert [completion.token_ids for completion in wrapped.generate(PROMPTS, GREEDY)] == found


def test_frequencies_that_rounds_look_up_in_a_table() -> None:
    steps = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, **steps}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**TINY, "rope_parameters": rope})).eval()
    enlarge(model)
    with wrap(model, None) as wrapped:
        wrapped.generate(PROMPTS, GREEDY)
        rotary = model.model.rotary_emb
        with torch.no_grad():
            model(torch.zeros(1, 90, dtype=torch.long))  # chooses frequencies anew
        wrapped.generate(PROMPTS, GREEDY)
        before = rotary.original_inv_freq
        rotary.original_inv_freq = 0.5 * before
        with pytest.raises(ModelChangedError, match="original_inv_freq is another"):
            wrapped.generate(PROMPTS, GREEDY)
        rotary.original_inv_freq = before
        wrapped.generate(PROMPTS, GREEDY)
        before.mul_(0.5)
        with pytest.raises(ModelChangedError, match="original_inv_freq is another"):
            wrapped.generate(PROMPTS, GREEDY)


def test_end_tokens_are_those_of_the_model_at_the_call() -> None:
    model = made("llama", Steering())
    with wrap(model, None) as wrapped:
        text = wrapped.generate(PROMPTS[0], SamplingParams(max_new_tokens=NEW))[0].token_ids
        model.generation_config.eos_token_id = text[1]
        assert wrapped.generate(PROMPTS[0], SamplingParams(max_new_tokens=NEW))[0].token_ids == text[:2]
