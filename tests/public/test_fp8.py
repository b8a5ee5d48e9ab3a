"""Targets published in fine-grained FP8: loaded from a folder; their tokens are those of the arithmetic, plainly."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import LetterTokenizer, table_head
from safetensors.torch import load_file, save_file
from transformers.integrations import finegrained_fp8
from transformers.integrations.finegrained_fp8 import FP8Linear

from specdec import SamplingParams, SpeculativeModel
from specdec.errors import ModelLoadError, SpecdecError, SpecdecWarning, UnsupportedModelError
from specdec.loading.backends import check_backend_fits
from specdec.loading.sizes import check_weights_fit
from specdec.ops import fp8 as operators
from specdec.ops.mixtures import routed as of_experts
from specdec.wrapped.probing import probe_target
from specdec.wrapped.quantised_layers import Fp8Linear
from tests.fakes import load_target
from tests.fp8 import (
    DEEPSEEK,
    FP8,
    LLAMA,
    QWEN,
    SCHEME,
    configure,
    gaps,
    greedy,
    prompts,
    quantised,
    reference,
    rewrite,
    write,
)
from tests.router_ties import LARGE, NEAR, Choice, check_tokens, explained_gaps, routed

pytestmark = [pytest.mark.usefixtures("every_self_test"), pytest.mark.filterwarnings("ignore:.*runs on a CPU")]

SIZES = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "page_size": 4, "kv_cache_tokens": 400}
PROMPTS = prompts((5, 33, 17))
NEW = 20
PARAMS = SamplingParams(max_new_tokens=NEW)
DOWN = "model.layers.1.mlp.down_proj.weight"


def load(target: Any, draft: Any = None, **options: Any) -> SpeculativeModel:
    return SpeculativeModel.from_pretrained(target, draft, tokenizer=LetterTokenizer(), **SIZES, **options)


def tokens(model: SpeculativeModel) -> list[list[int]]:
    return [completion.token_ids for completion in model.generate(PROMPTS, PARAMS)]


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of transformers' own that would fetch a kernel is ever called."""

    def fetch(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("transformers was to fetch a kernel from a hub")

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", fetch)
    monkeypatch.setattr(finegrained_fp8, "load_finegrained_fp8_kernel", fetch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "static"),
    [
        *((LLAMA, False), pytest.param(LLAMA, True, marks=pytest.mark.long)),
        *((DEEPSEEK, False), pytest.param(QWEN, False, marks=pytest.mark.long)),
    ],
    ids=["llama", "static", "deepseek", "qwen"],
)
@pytest.mark.thorough
def test_tokens_are_those_of_the_arithmetic_written_plainly(
    tmp_path: Path, sizes: dict[str, Any], static: bool
) -> None:
    """K = 0 and K = 3; blocks that are whole and cut, experts, latent attention, one scale a weight."""
    folder = write(tmp_path / "target", sizes, static=static)
    oracle = reference(folder, sizes, float(torch.tensor(0.01)) if static else None)
    right = [greedy(oracle, prompt, NEW) for prompt in PROMPTS]
    with load(folder, dtype="float64") as model:
        assert tokens(model) == right
    head: Any = table_head(oracle, aux_layers=(1, 2))
    for name in ("fuse_weight", "qkv", "mix", "table"):
        setattr(head, name, getattr(head, name).double())
    with load(folder, head, num_speculative_tokens=3, dtype="float64") as model:
        completions = model.generate(PROMPTS, PARAMS)
        assert [c.token_ids for c in completions] == right
        emitted = [round_.emitted for c in completions for round_ in c.stats.rounds if round_.drafted == 3]
        assert min(emitted) == 1 < max(emitted), "drafts are accepted, and rejected"
        assert (
            model.hf_model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=NEW, do_sample=False)[
                0, len(PROMPTS[0]) :
            ].tolist()
            == right[0]
        ), "the model's own generate runs our operators too"


@pytest.mark.slow
@pytest.mark.thorough
def test_a_prediction_module_in_fp8_beside_its_target(tmp_path: Path) -> None:
    """As in DeepSeek-V3's own checkpoint: the module is multiplied out, the target is not, and says the same."""
    folder = write(tmp_path / "target", {**DEEPSEEK, "num_nextn_predict_layers": 1})
    file, width = folder / "model.safetensors", DEEPSEEK["hidden_size"]
    stored, plain = load_file(file), torch.ones(width, dtype=torch.bfloat16)
    module = {n.replace("layers.1.", "layers.2."): t.clone() for n, t in stored.items() if ".layers.1." in n}
    names = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    module |= {f"model.layers.2.{name}": plain.clone() for name in names}
    module["model.layers.2.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    module["model.layers.2.shared_head.head.weight"] = stored["lm_head.weight"].clone()
    projection = "model.layers.2.eh_proj.weight"
    module[projection], module[f"{projection}_scale_inv"] = quantised(torch.randn(width, 2 * width) / 16)
    save_file({**stored, **module}, file, metadata={"format": "pt"})
    said = []
    for draft, drafts in ((None, 0), ("mtp", 3)):
        with load(folder, draft, num_speculative_tokens=drafts) as model:
            said.append(tokens(model))
            assert all(p.dtype != FP8 for p in model.head.parameters()) if draft else model.head is None
    assert said[0] == said[1]


@pytest.mark.slow
@pytest.mark.thorough
def test_weights_stay_in_8_bits_and_it_is_said(tmp_path: Path) -> None:
    folder = write(tmp_path / "target", LLAMA)
    with pytest.warns(SpecdecWarning, match="quantised in FP8 and runs on a CPU"):
        model = load(folder)
    facts = model.describe()
    found = facts["quantisation"]
    assert found["method"] == "fp8" and found["scheme"] == "fine-grained, 128x128"
    assert found["runs"] == "multiplied out in float32 in every matmul"
    assert facts["dtype"] == "float32"
    layers = [m for m in model.hf_model.modules() if isinstance(m, FP8Linear)]
    assert len(layers) == 14 and {type(m) for m in layers} == {Fp8Linear}
    assert all(m.weight.dtype == FP8 for m in layers)
    quantised = sum(m.weight.numel() + 4 * m.weight_scale_inv.numel() for m in layers)
    rest = sum(4 * p.numel() for n, p in model.hf_model.named_parameters() if "embed" in n or "norm" in n or "lm" in n)
    assert facts["weights_bytes"] == quantised + rest
    hf_model = model.hf_model
    model.close()
    assert {type(m) for m in layers} == {FP8Linear} and model.hf_model is hf_model
    again, other = load(hf_model), load(hf_model)
    again.close()
    assert {type(m) for m in layers} == {Fp8Linear}, "the other engine runs them still"
    assert len(tokens(other)[0]) == NEW
    other.close()
    assert {type(m) for m in layers} == {FP8Linear} and not any("_specdec_holders" in vars(m) for m in layers)


def shifted(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A matmul that multiplies each block by the scale of the next one."""

    def wrong(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, dtype: Any) -> Any:
        return function(x, x_scale, weight, scale.roll(1, -1), dtype)

    return wrong


@pytest.mark.parametrize("sizes", [LLAMA, {**DEEPSEEK, "moe_intermediate_size": 256}], ids=["linear", "experts"])
@pytest.mark.cases(1)
def test_an_operator_with_wrong_scales_is_refused(
    tmp_path: Path, sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of the logits' self-test's readings would have the same mistake; the operators' own finds it."""
    folder = write(tmp_path / "target", sizes)
    place = operators if sizes is LLAMA else of_experts
    monkeypatch.setattr(place, "reference_matmul", shifted(operators.reference_matmul))
    with pytest.raises(
        UnsupportedModelError, match=r"a matmul of quantised weights comes out wrong on cpu: relative error .*weight of"
    ):
        load(folder)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.cases(1)
def test_scales_that_are_none(tmp_path: Path, value: float) -> None:
    folder = rewrite(write(tmp_path / "target", LLAMA), f"{DOWN}_scale_inv", lambda s: s.fill_(value))
    with pytest.raises(UnsupportedModelError, match=rf"layers\.1\.mlp\.down_proj\.weight_scale_inv holds {value}"):
        load(folder)


def test_scales_that_are_missing_or_of_another_shape(tmp_path: Path) -> None:
    folder = write(tmp_path / "target", LLAMA)
    # transformers 5.17 does not report them: then our own check does
    with pytest.raises(SpecdecError, match=r"model\.layers\.1\.mlp\.down_proj\.weight_scale_inv.*\[2, 1\].*\[2, 3\]"):
        load(rewrite(folder, f"{DOWN}_scale_inv", lambda scale: scale[:, :1].clone()))
    with pytest.raises(ModelLoadError, match=r"1 tensor missing .*down_proj\.weight_scale_inv"):
        load(rewrite(folder, f"{DOWN}_scale_inv", lambda scale: None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]; supported are blocks of 128 x 128"),
        ({"weight_block_size": None}, "one scale a weight .* with activation_scheme='dynamic'"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt='ue8m0'"),
        ({"dequantize": True}, "dequantize=true, another model"),
        ({"fmt": "e5m2"}, "fmt='e5m2'; supported is 'e4m3'"),
    ],
)
def test_schemes_without_an_operator_are_refused_before_weights_are_read(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = configure(write(tmp_path / "target", LLAMA), quantization_config=SCHEME | changes)
    (folder / "model.safetensors").unlink()
    (folder / "model-00001-of-00001.safetensors").write_bytes(b"")
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedModelError, match=message):
        load(folder)


def test_room_for_the_weights_is_counted_in_bytes_of_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_target(write(tmp_path / "target", LLAMA), torch.bfloat16, torch.device("cpu"))
    needed = sum(
        p.numel() * (1 if p.dtype == FP8 else 4 if "scale" in n else 2) for n, p in model.named_parameters()
    ) + sum(b.nbytes for b in model.buffers())
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 80 << 30))
        with nullcontext() if fits else pytest.raises(ModelLoadError, match="the weights of 'tiny' take"):
            check_weights_fit(model, torch.device("cuda"), "tiny")


def test_a_batch_invariant_backend_is_refused(tmp_path: Path) -> None:
    backend: Any = SimpleNamespace(batch_invariant=True)
    probed = probe_target(load_target(write(tmp_path / "target", LLAMA), torch.float32, torch.device("cpu")))
    with pytest.raises(UnsupportedModelError, match=r"quantised in FP8, .* not with backend='batch_invariant'"):
        check_backend_fits(probed, backend)


def half(folder: Path) -> list[Any]:
    with load(folder, dtype="bfloat16") as model:
        return model.generate(PROMPTS, SamplingParams(max_new_tokens=24))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_router_turns_few_tokens_in_half_precision(tmp_path: Path) -> None:
    folder = write(tmp_path / "target", DEEPSEEK)
    check_tokens(reference(folder, DEEPSEEK), half(folder))


@pytest.mark.slow
@pytest.mark.thorough
def test_only_a_near_tie_of_a_router_explains_a_token(tmp_path: Path) -> None:
    """Tokens that are the oracle's best by the other choice of a router, whether that is nearly as good or not."""
    oracle, (text,) = reference(write(tmp_path / "target", DEEPSEEK), DEEPSEEK), prompts((160,), seed=5)
    choices: list[Choice] = []
    with torch.no_grad(), routed(oracle, lambda _, found: choices.extend(found)):
        oracle(torch.tensor([text]))
    seen = {True: 0, False: 0}
    for place in range(len(text)):
        near = choices[place].margin < NEAR
        if seen[near] == 2:
            continue
        with torch.no_grad(), routed(oracle, lambda *_, place=place: place):
            best = int(oracle(torch.tensor([text[: place + 1]])).logits[0, -1].argmax())
        answer = SimpleNamespace(prompt_token_ids=text[: place + 1], token_ids=[best])
        if float(gaps(oracle, answer)) >= LARGE:
            seen[near] += 1
            found, explained = explained_gaps(oracle, answer)
            assert (explained == [0], float(found) == 0) == (near, near)
        if seen == {True: 2, False: 2}:
            return
    raise AssertionError(f"too few tokens of each kind: {seen}")


@pytest.mark.slow
@pytest.mark.parametrize("defect", ["a scale ignored", "experts swapped", "the router's rows swapped"])
@pytest.mark.thorough
def test_a_defect_is_no_near_tie(defect: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "target", DEEPSEEK)
    oracle = reference(folder, DEEPSEEK)
    down = "model.layers.1.mlp.experts.{}.down_proj.weight".format
    if defect == "experts swapped":
        tensors = load_file(folder / "model.safetensors")
        tensors[down(2)], tensors[down(3)] = tensors[down(3)].clone(), tensors[down(2)].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    elif defect == "a scale ignored":
        rewrite(folder, down(2) + "_scale_inv", torch.ones_like)
    else:
        rewrite(folder, "model.layers.1.mlp.gate.weight", lambda weight: weight.roll(1, 0))
    answers = half(folder)
    with pytest.raises(AssertionError):
        check_tokens(oracle, answers)
