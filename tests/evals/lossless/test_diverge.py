"""Operators whose results depend on the batch are named, each of those that are planted and no other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from fakes import TINY, enlarge, tiny_llama, wrap
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama

import evals.lossless.diverge as module
import specdec.compiler.compiling
from evals.cli.main import evaluate
from evals.data.datasets import load
from evals.lossless.diverge import diverge
from evals.report.terminal import template
from specdec.model import SpeculativeModel
from specdec.ops.packed_weight import PackedWeight

TEXTS = ["Tom has 3 boxes", "and a longer text of a few words", "x"]
OPTIONS: dict[str, Any] = {"backend": "batch_invariant", "kv_cache_tokens": 1200}
DTYPES = [torch.float32, torch.bfloat16]


def invariant(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return wrap(tiny_llama().to(dtype), **OPTIONS | options)


def kinds(found: Any) -> list[str]:
    return list(dict.fromkeys(each["kind"] for each in found["operators"]))


def text(found: Any) -> str:
    assert json.loads(json.dumps(found, allow_nan=False))["verdict"] == found["verdict"]
    return template("diverge.txt").render(document=found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_differs_in_an_invariant_model(dtype: torch.dtype) -> None:
    model = invariant(dtype)
    calls = torch.nn.Module.__call__
    before = dict(vars(model.target)), dict(vars(model.target.runner))
    found = diverge(model, TEXTS)
    assert found["operators"] == [] and not found["logits"] and found["verdict"] == "PASS"
    assert "Nothing differs: no module, no attention and no logits" in text(found)
    assert torch.nn.Module.__call__ is calls
    assert (vars(model.target), vars(model.target.runner)) == before


def of_few(function: Any, fewest: int = 4) -> Any:
    """A forward that rounds otherwise for fewer tokens."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return function(x) * (1 + 2**-7 * (x.shape[-2] < fewest))

    return forward


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.1.post_attention_layernorm", "LlamaRMSNorm [32]"),
        ("model.layers.2.mlp.down_proj", "Linear [32, 48]"),
        ("model.layers.3", "LlamaDecoderLayer []"),
        ("lm_head", "Linear [64, 32]"),
    ],
)
def test_one_planted_module_is_named_and_no_other(name: str, kind: str, dtype: torch.dtype) -> None:
    model = invariant(dtype)
    planted = model.hf_model.get_submodule(name)
    if "layers.3" in name:  # the module's own code after its last submodule
        right = planted.forward
        planted.forward = lambda x, **more: right(x, **more) * (1 + 2**-7 * (x.shape[1] < 4))
    else:
        planted.forward = of_few(planted.forward)
    found = diverge(model, TEXTS)
    (only,) = found["operators"]
    assert (only["name"], only["kind"]) == (name, kind)
    assert only["tokens"] == 3 and only["largest"] > 0
    assert [only["stop"][row] - only["start"][row] for row in only["rows"]] == [1, 1, 1]
    assert found["logits"] and found["verdict"] == "FAIL"
    assert f"{name}, {kind.removesuffix(' []')}: 3 tokens differ" in text(found)


def test_a_norm_that_sums_in_another_order_for_one_token() -> None:
    model = invariant()
    for layer in model.hf_model.model.layers[1:]:
        norm = layer.input_layernorm

        def forward(x: torch.Tensor, norm: Any = norm) -> torch.Tensor:
            squares = x.pow(2)
            halves = squares[..., ::2].sum(-1, keepdim=True) + squares[..., 1::2].sum(-1, keepdim=True)
            mean = halves / 32 if x.shape[1] == 1 else squares.mean(-1, keepdim=True)
            return norm.weight * x * torch.rsqrt(mean + norm.variance_epsilon)

        norm.forward = forward
    found = diverge(model, TEXTS)
    names = [each["name"] for each in found["operators"]]
    assert kinds(found) == ["LlamaRMSNorm [32]"] and names == sorted(names)
    assert set(names) <= {f"model.layers.{n}.input_layernorm" for n in (1, 2, 3)}
    assert all(each["stop"][0] - each["start"][0] == 1 for each in found["operators"])


@pytest.mark.parametrize("tokens", [65, 32])
def test_rows_are_also_read_whole_by_themselves_and_cut_in_the_middle(tokens: int) -> None:
    model = invariant()
    norm = model.hf_model.model.norm
    right = norm.forward
    norm.forward = lambda x: right(x) * (1 + 2**-7 * (x.shape[1] == tokens))
    (only,) = diverge(model, TEXTS)["operators"]
    assert (only["name"], only["tokens"]) == ("model.norm", tokens)


def test_one_linear_layer_that_is_left_plain() -> None:
    model = invariant()
    layer = model.hf_model.model.layers[2].mlp.gate_proj
    weight = layer.weight.plain().clone()
    layer.forward = lambda x: F.linear(x, weight)
    found = diverge(model, TEXTS)
    assert [each["name"] for each in found["operators"]] == ["model.layers.2.mlp.gate_proj"]


def test_code_between_modules_is_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = invariant()
    right = modeling_llama.apply_rotary_pos_emb
    uneven = lambda q, k, *of: tuple(x * (1 + 2**-7 * (q.shape[2] < 4)) for x in right(q, k, *of))  # noqa: E731
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", uneven)
    found = diverge(model, TEXTS)
    assert kinds(found) == ["LlamaAttention []"]
    assert {each["name"] for each in found["operators"]} == {f"model.layers.{n}.self_attn" for n in range(4)}


def test_attention_of_the_plain_backend() -> None:
    """Between layers that are the same in any batch."""
    model = invariant()
    for builder in vars(model.target.runner)["_builders"].values():
        vars(builder)["_exact"] = False
    found = diverge(model, TEXTS)
    assert found["operators"] and {each["name"] for each in found["operators"]} == {"attention"}
    assert found["operators"][0]["caller"].startswith("model.layers.")
    assert "attention of model.layers." in text(found)


def test_plain_layers_and_attention() -> None:
    found = diverge(wrap(tiny_llama(), backend="torch", kv_cache_tokens=1200), TEXTS)
    assert found["verdict"] == "FAIL" and {"attention", "lm_head"} <= {each["name"] for each in found["operators"]}
    assert found["operators"][0]["name"].startswith("model.layers.0.self_attn.") and found["logits"]


def test_the_plain_backend_in_bfloat16() -> None:
    model = SpeculativeModel.from_pretrained("gsm-llama", backend="torch", dtype="bfloat16", device="cpu")
    found = diverge(model, [question.turns[0] for question in load("arithmetic", limit=8).questions])
    assert found["operators"] and found["verdict"] == "FAIL"


def test_calls_that_depend_on_the_batch_shift_no_others() -> None:
    """Experts are called as often as a token chooses one of them."""
    options = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": []}
    moe = Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY, **options)).eval()
    enlarge(moe, 0)
    found = diverge(wrap(moe, backend="torch", kv_cache_tokens=1200), TEXTS)
    names = [each["name"] for each in found["operators"]]
    assert names[0].startswith("model.layers.0.self_attn.") and "lm_head" in names
    assert not any("norm" in name or "rotary" in name for name in names)


def test_logits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = invariant()
    right = model.target.launch
    monkeypatch.setattr(model.target, "launch", lambda ids, *rest: right(ids, *rest) + 1e-3 * (len(ids) < 4))
    found = diverge(model, TEXTS)
    assert found["operators"] == [] and "differ by up to 0.001" in found["logits"] and found["verdict"] == "FAIL"
    assert "No module differs by itself, but logits do" in text(found)


def test_recorded_steps_hide_nothing() -> None:
    model = invariant()
    steps = model.target.steps
    for _ in range(2):
        assert diverge(model, TEXTS)["verdict"] == "PASS"
    assert model.target.steps is steps and any(shape.recording for shape in steps.shapes.values())
    norm = model.hf_model.model.norm
    norm.forward = of_few(norm.forward)
    assert [each["name"] for each in diverge(model, TEXTS)["operators"]] == ["model.norm"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What would be compiled, which runs as it is."""
    made: list[Any] = []

    def fake(function: Any) -> Any:
        made.append(function)
        return function

    monkeypatch.setattr(specdec.compiler.compiling, "compiled", fake)
    yield made


def test_with_graphs_modules_are_compiled_alone(compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU; at least two tokens are read, as by compiled code."""
    model = invariant()
    monkeypatch.setattr(model, "graphs", "on")
    sizes = set()
    model.hf_model.model.norm.register_forward_hook(lambda _, args, out: sizes.add(out.shape[1]))
    assert diverge(model, TEXTS)["verdict"] == "PASS"
    whole, *leaves = compiled
    assert whole is model.hf_model and 1 not in sizes and 2 in sizes
    names = {name for name, each in model.hf_model.named_modules() if each in [leaf.__self__ for leaf in leaves]}
    assert {"lm_head", "model.norm", "model.layers.3.mlp.act_fn", "model.layers.0.self_attn.q_proj"} <= names
    assert not {"", "model", "model.layers.0", "model.layers.0.mlp", "model.layers.0.self_attn"} & names
    norm = model.hf_model.model.layers[1].input_layernorm
    norm.forward = of_few(norm.forward, 3)
    (only,) = diverge(model, TEXTS)["operators"]
    assert only["name"] == "model.layers.1.input_layernorm" and only["tokens"] == 1


def test_leaves_are_really_compiled_and_may_call_modules_that_they_do_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twelve sizes of one kind of layer, more than the compiler takes by default; a norm calls an activation."""
    model = invariant()
    monkeypatch.setattr(model, "graphs", "on")
    for number, layer in enumerate(model.hf_model.model.layers):
        layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj = (
            torch.nn.Linear(*sizes, bias=number % 2 == 0).requires_grad_(False)
            for sizes in ((32, 40 + number), (32, 40 + number), (40 + number, 32))
        )
    norm, act = model.hf_model.model.norm, ACT2FN["silu"]
    right = norm.forward
    norm.forward = lambda x: right(x) + 0 * act(x)
    packed = [module for module in model.hf_model.modules() if type(getattr(module, "weight", None)) is PackedWeight]

    def compiled(function: Any) -> Any:
        if function is model.hf_model or getattr(function, "__self__", None) in packed:
            return function
        return torch.compile(function, backend="eager", fullgraph=True, dynamic=True)

    monkeypatch.setattr(specdec.compiler.compiling, "compiled", compiled)
    torch.compiler.reset()
    assert all(".mlp." in each["name"] for each in diverge(model, TEXTS)["operators"])  # plain layers


def test_a_model_that_the_self_test_refuses_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    model.model.norm.forward = of_few(model.model.norm.forward)
    spec: Any = SimpleNamespace(load=lambda: wrap(model, **OPTIONS))
    found = diverge(module.load(spec), TEXTS)
    assert [each["name"] for each in found["operators"]] == ["model.norm"]


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    model = invariant()
    monkeypatch.setattr(module, "load", lambda spec: model if spec.options.self_test == "quick" else None)
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": each}) for each in TEXTS))
    command = ["diverge", "gsm-llama", "--data", str(file), "--output", str(tmp_path / "d.json")]
    done = CliRunner().invoke(evaluate, command)
    assert done.exit_code == 0 and "Nothing differs" in done.output
    layer = model.hf_model.model.layers[0].mlp.up_proj
    layer.forward = of_few(layer.forward)
    done = CliRunner().invoke(evaluate, command)
    assert done.exit_code == 1 and "model.layers.0.mlp.up_proj, Linear [48, 32]: 3 tokens differ" in done.output
    assert json.loads((tmp_path / "d.json").read_text())["operators"][0]["kind"] == "Linear [48, 32]"
