"""Fine-grained FP8 on a GPU: kernels against sums in float32, targets from CUDA graphs; no kernel is fetched."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import LetterTokenizer
from transformers import AutoModelForCausalLM
from transformers.integrations import finegrained_fp8

from benchmarks.fp8_weights import quantise
from benchmarks.shapes import SHAPES
from benchmarks.synthetic import Tokenizer
from specdec import SamplingParams, SpeculativeModel
from specdec.compiler.siblings import SiblingFp8Linear
from specdec.errors import SpecdecWarning, UnsupportedModelError
from specdec.ops.elementwise import add_rms_norm, rms_norm, silu_product
from specdec.ops.fp8 import (
    FP8,
    add_rms_norm_fp8,
    fp8_linear,
    fp8_matmul,
    fp8_quantise,
    reference_matmul,
    rms_norm_fp8,
    silu_product_fp8,
)
from specdec.ops.mixtures.paired import expert_matmul
from tests.fp8 import DEEPSEEK, LLAMA, QWEN, gaps, prompts, quantised, reference, write
from tests.router_ties import check_tokens

CUDA = torch.device("cuda")
HALF = torch.bfloat16


def error(ours: torch.Tensor, right: torch.Tensor) -> float:
    return float((ours.double() - right.double()).norm() / right.double().norm())


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("transformers was to fetch a kernel from a hub")

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", fetch)
    monkeypatch.setattr(finegrained_fp8, "load_finegrained_fp8_kernel", fetch)


@pytest.mark.parametrize("dtype", [torch.float16, HALF, torch.float32])
@pytest.mark.parametrize("width", [128, 200, 1408, 14336])
def test_activations_are_quantised_as_by_torch(dtype: torch.dtype, width: int) -> None:
    """But for a last bit: a GPU divides in float32 to 2 units in the last place, which may move a tie."""
    torch.manual_seed(0)
    x = torch.randn(7, 2 * width, device=CUDA, dtype=dtype)[:, width:] * 3
    values, scales = fp8_quantise(x)
    right, right_scales = fp8_quantise(x.cpu())
    torch.testing.assert_close(scales.cpu(), right_scales, rtol=1e-6, atol=0)
    steps = (values.cpu().view(torch.uint8).int() - right.view(torch.uint8).int()).abs()
    assert steps.max() <= 1 and (steps > 0).float().mean() < 1e-3
    zeros, none = fp8_quantise(torch.zeros(2, 256, device=CUDA, dtype=dtype))
    assert not zeros.float().any() and not none.any()


@pytest.mark.parametrize("dtype", [torch.float16, HALF])
@pytest.mark.parametrize(("tokens", "width"), [(1, 4096), (6, 200), (48, 14336)])
def test_norms_and_activations_end_in_8_bits_as_in_two_launches(dtype: torch.dtype, tokens: int, width: int) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 1, tokens, width, device=CUDA, dtype=dtype)
    weight = torch.randn(width, device=CUDA, dtype=dtype)
    total, plain = add_rms_norm(x, residual, weight, 1e-5)
    ours = add_rms_norm_fp8(x, residual, weight, 1e-5)
    assert torch.equal(ours[0], total)
    cases = [
        (ours[1:], plain),
        (rms_norm_fp8(x, weight, 1e-5), rms_norm(x, weight, 1e-5)),
        (silu_product_fp8(x, residual), silu_product(x, residual)),
    ]
    for (values, scales), result in cases:
        right, right_scales = fp8_quantise(result[0])
        assert (values.view(torch.uint8) != right.view(torch.uint8)).float().mean() < 0.01
        torch.testing.assert_close(scales, right_scales, rtol=0.01, atol=0)  # a last bit of half precision


@pytest.mark.parametrize("tokens", [1, 2, 6, 16, 17, 48, 64, 65, 128, 192, 256, 257, 1024])
@pytest.mark.parametrize(("rows", "width"), [(128, 128), (576, 7168), (1000, 200), (4096, 4096), (28_672, 4096)])
def test_matmuls_are_those_of_float32(tokens: int, rows: int, width: int) -> None:
    """Every tiling, rows and columns that fill no tile; and a wrong scale shows."""
    torch.manual_seed(tokens)
    sizes = torch.rand(tokens, -(-width // 128), device=CUDA).repeat_interleave(128, 1)[:, :width]
    x, x_scale = fp8_quantise(torch.randn(tokens, width, device=CUDA, dtype=HALF) * sizes.to(HALF))
    weight = torch.randn(rows, width, device=CUDA).to(FP8)
    scale = torch.rand(-(-rows // 128), -(-width // 128), device=CUDA) + 0.2
    right = reference_matmul(x, x_scale, weight, scale)
    assert error(fp8_matmul(x, x_scale, weight, scale, torch.float32), right) < 2e-3
    assert error(fp8_matmul(x, x_scale, weight, scale, HALF), right) < 4e-3
    if width > 128:
        assert error(fp8_matmul(x, x_scale, weight, scale.roll(1, 1), HALF), right) > 0.05


@pytest.mark.parametrize("tiling", [(16, 64, True, 4, 3, 2), (16, 64, True, 4, 2, 4), (64, 64, False, 4, 4, 1)])
@pytest.mark.parametrize("splits", [2, 5, 8])
def test_splits_add_up_to_the_same_bits_every_time(tiling: tuple[Any, ...], splits: int) -> None:
    """Also beside other tokens; whole and cut steps; scales of one number for the whole weight."""
    from specdec.ops.fp8_kernel import Fp8Tiling, launch_fp8_matmul

    torch.manual_seed(0)
    for width in (4096, 14_336, 1000):
        x, x_scale = fp8_quantise(torch.randn(13, width, device=CUDA, dtype=HALF))
        weight = torch.randn(1000, width, device=CUDA).to(FP8)
        one = torch.rand(1, 1, device=CUDA).expand(8, -(-width // 128))
        for scale in (torch.rand(8, -(-width // 128), device=CUDA) + 0.2, one):
            given, tile = (weight, scale, torch.float32), Fp8Tiling(*tiling, splits)
            ours = launch_fp8_matmul(x, x_scale, *given, tile)
            assert error(ours, reference_matmul(x, x_scale, weight, scale)) < 2e-3
            assert all(torch.equal(ours, launch_fp8_matmul(x, x_scale, *given, tile)) for _ in range(20))
            assert torch.equal(launch_fp8_matmul(x[4:5], x_scale[4:5], *given, tile)[0], ours[4])


def test_the_self_test_passes_32_layers() -> None:
    """Of the 8B shape, in bfloat16: rounding activations would make an error of 0.37 on an H200."""
    config = SHAPES["llama-3.1-8b"]()
    torch.manual_seed(0)
    with CUDA:
        target = AutoModelForCausalLM.from_config(config, dtype=HALF).eval().requires_grad_(False)
    quantise(target)
    sizes: dict[str, Any] = {"max_num_seqs": 2, "kv_cache_tokens": 2048, "max_model_len": 512, "cuda_graphs": False}
    with SpeculativeModel.from_pretrained(target, tokenizer=Tokenizer(), **sizes) as model:
        assert 0 < model.self_test_error < 0.2


def test_one_scale_a_weight_and_a_bias() -> None:
    torch.manual_seed(0)
    x, plain = torch.randn(2, 3, 512, device=CUDA, dtype=HALF), torch.randn(300, 512)
    scale, by, bias = plain.abs().max() / 448, torch.tensor(0.01, device=CUDA), torch.randn(300, device=CUDA).to(HALF)
    weight = (plain / scale).to(FP8).to(CUDA)
    out = fp8_linear(x, weight, scale.to(CUDA), bias, by)
    rounded = (x.float() / 0.01).clamp(-448, 448).to(FP8).float() * 0.01
    assert error(out, rounded @ (weight.float() * scale.item()).t() + bias.float()) < 5e-3


@pytest.mark.parametrize(("tokens", "own", "chosen"), [(1, 1, 8), (3, 8, 8), (40, 1, 8), (300, 8, 8)])
def test_experts_are_those_of_float32(tokens: int, own: int, chosen: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, own, 768, device=CUDA)
    stack, scales = torch.randn(32, 512, 768, device=CUDA).to(FP8), torch.rand(32, 4, 6, device=CUDA) + 0.2
    index = torch.rand(tokens, 32, device=CUDA).topk(chosen, -1).indices
    given = x, stack, scales, index
    right = expert_matmul(*(t.cpu() for t in given))
    assert error(expert_matmul(*given).cpu(), right) < 2e-3


def test_a_captured_chain_of_matmuls_follows_its_input() -> None:
    """Each is launched while the one before ends; every replay must see its predecessor's output."""
    torch.manual_seed(0)
    layers = [tuple(t.to(CUDA) for t in quantised(torch.randn(2048, 2048) / 45)) for _ in range(8)]
    x = torch.zeros(6, 2048, device=CUDA, dtype=HALF)

    def chain() -> torch.Tensor:
        out = x
        for weight, scale in layers:
            out = fp8_linear(out, weight, scale)
        return out

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for seed in range(20):
        x.copy_(torch.randn(6, 2048, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert torch.equal(out, chain())


@pytest.mark.parametrize("sizes", [LLAMA, DEEPSEEK, QWEN], ids=["llama", "deepseek", "qwen"])
@pytest.mark.parametrize("graphs", [False, True])
def test_a_target_from_a_folder(tmp_path: Path, sizes: dict[str, Any], graphs: bool) -> None:
    """Compiled, fused and captured, or not: each token is the oracle's best, or nearly.

    In bfloat16 and 8 bits a token may be another than in float64, so the oracle reads the answer, and its gap to the
    best token is looked at; a large one may come of a near tie of the router: the oracle then takes the other choice.
    """
    folder = write(tmp_path / "target", sizes | ({"head_dim": 64} if sizes is not DEEPSEEK else {}))
    oracle = reference(folder, sizes | ({"head_dim": 64} if sizes is not DEEPSEEK else {}))
    given = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "kv_cache_tokens": 2048, "cuda_graphs": graphs}
    with SpeculativeModel.from_pretrained(folder, tokenizer=LetterTokenizer(), device="cuda", **given) as model:
        found = model.describe()["quantisation"]
        assert (found["scheme"], found["runs"]) == ("fine-grained, 128x128", "as stored") and model.dtype == HALF
        assert (model.graphs == "on") == graphs
        fused = sum(isinstance(m, SiblingFp8Linear) for m in model.hf_model.modules())
        assert (fused > 0) == graphs
        answers = model.generate(prompts((5, 33, 17)), SamplingParams(max_new_tokens=24))
    check_tokens(oracle, answers)


def test_graphs_of_a_larger_model() -> None:
    """Four layers of the 8B shape: fused q, k, v and gate, up of FP8, captured without a warning; and each token is the
    best of the model's own eager forward, or nearly, whose operators are the same."""
    config = SHAPES["llama-3.1-8b"]()
    config.num_hidden_layers = 4
    torch.manual_seed(0)
    with CUDA:
        target = AutoModelForCausalLM.from_config(config, dtype=HALF).eval().requires_grad_(False)
    quantise(target)
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    sizes: dict[str, Any] = {"max_num_seqs": 2, "kv_cache_tokens": 2048, "max_model_len": 512, "cuda_graphs": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecdecWarning)
        model = SpeculativeModel.from_pretrained(target, tokenizer=Tokenizer(), **sizes)
    assert model.engine.executor.report.fused_groups == 2 * 4  # type: ignore[attr-defined]
    for answer in model.generate([list(range(7, 60)), list(range(100, 120))], params):
        found = gaps(target, answer)
        assert float(found.median()) < 0.05 and float(found.max()) < 0.5, found
    model.close()


def test_batch_invariance_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "target", LLAMA | {"head_dim": 64})
    with pytest.raises(UnsupportedModelError, match="FP8"):
        SpeculativeModel.from_pretrained(
            folder, tokenizer=LetterTokenizer(), device="cuda", backend="batch_invariant", kv_cache_tokens=2048
        )
