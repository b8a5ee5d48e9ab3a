"""Which backend a device gets; and kernels begin to be built from a configuration alone: the same ones that the model's
layers ask for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from attention.backends.flashinfer.wrapper import kernel_name
from attention.hf.probe import probe
from attention.spec import AttentionSpec
from specdec.errors import InvalidInputError, SpecdecWarning
from specdec.loading.backends import begin_kernels, expected_keys, make_backend, runs_evenly
from specdec.loading.cuda_graphs import choose_graphs

CUDA = torch.device("cuda")

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SIZES), LlamaConfig(**SIZES, head_dim=128), Qwen3Config(**SIZES), Gemma2Config(**SIZES)],
    ids=lambda config: config.model_type,
)
def test_the_same_as_the_model_asks_for(config: Any) -> None:
    """Layers beside it may ask for more; every one that is expected is needed."""
    asked = {call.attention_spec for call in probe(AutoModelForCausalLM.from_config(config).eval()).calls}
    bf16 = torch.bfloat16
    names = {kernel_name(bf16, key, bf16, "fa2") for key in asked}
    assert {kernel_name(bf16, key, bf16, "fa2") for key in expected_keys(config)} == names


def test_what_a_configuration_does_not_say_plainly_is_left_to_the_model() -> None:
    assert expected_keys(MistralConfig(**SIZES, sliding_window=16)) == []
    assert expected_keys(GptOssConfig()) == []
    gemma4 = AutoConfig.for_model("gemma4_text")  # from transformers 5.2x on its head_dim cannot be read
    assert expected_keys(gemma4) == [] or not getattr(gemma4, "is_heterogeneous", False)
    (latent,) = expected_keys(DeepseekV2Config())
    assert latent.value_in_key


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    """Nobody who asked for a backend by name is warned of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecdecWarning)
        yield


@pytest.fixture
def without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention.backends.kinds.find_spec", lambda name: None)


def test_without_flashinfer_a_gpu_takes_flex_and_says_so(without_flashinfer: None) -> None:
    with pytest.warns(SpecdecWarning, match=r"FlashInfer is not installed .*: backend='auto' is 'flex'"):
        assert make_backend("auto", CUDA).name == "flex"
    assert [make_backend(name, CUDA).name for name in ("flex", "torch")] == ["flex", "torch"]
    assert make_backend("auto", torch.device("cpu")).name == "torch"
    with pytest.raises(
        InvalidInputError, match=r"FlashInfer is not installed: .*backend='flex', which has no CUDA graphs"
    ):
        make_backend("flashinfer", CUDA)


def test_flex_runs_without_graphs_and_says_so() -> None:
    choice = choose_graphs(make_backend("flex", CUDA), None, "auto")
    assert (choice.expected, choice.reason) == (True, "backend 'flex' has none")
    with pytest.raises(
        InvalidInputError, match="cuda_graphs=True needs a backend for a GPU that has graphs, not 'flex'"
    ):
        choose_graphs(make_backend("flex", CUDA), None, True)


def test_the_batch_invariant_backend_of_a_cpu_needs_no_graphs() -> None:
    backend = make_backend("batch_invariant", torch.device("cpu"))
    assert runs_evenly(backend) and not runs_evenly(make_backend("batch_invariant", CUDA))
    assert choose_graphs(backend, None, "auto").reason == "backend 'batch_invariant' has none"
    with pytest.raises(InvalidInputError, match="cuda_graphs=True needs a backend for a GPU that has graphs"):
        choose_graphs(backend, None, True)


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch built for ROCm, as far as the code can tell, with FlashInfer installed. Untested on such hardware."""
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr("attention.backends.kinds.find_spec", lambda name: object())


def test_on_rocm_auto_takes_flex_and_torch_stays(rocm: None) -> None:
    with pytest.warns(SpecdecWarning, match="built for ROCm, on which this library is not tested: backend='auto' is"):
        assert make_backend("auto", CUDA).name == "flex"
    assert [make_backend(name, CUDA).name for name in ("flex", "torch")] == ["flex", "torch"]


@pytest.mark.parametrize("name", ["flashinfer", "batch_invariant"])
def test_on_rocm_kernels_for_nvidia_are_refused_by_name(name: str, rocm: None) -> None:
    message = (
        rf"backend='{name}' has kernels for NVIDIA GPUs only, .* ROCm \(HIP 6.4.43482\); use backend='flex' or 'torch'"
    )
    with pytest.raises(InvalidInputError, match=message):
        make_backend(name, CUDA)


def test_on_rocm_nothing_of_flashinfer_is_built(rocm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr("attention.backends.flashinfer.backend.start_building", lambda *args: built.append(args))
    key = AttentionSpec(8, 2, 64, 64, 0.125)
    begin_kernels("auto", CUDA, [key], torch.bfloat16, "auto")
    assert not built
    monkeypatch.setattr(torch.version, "hip", None)
    begin_kernels("auto", CUDA, [key], torch.bfloat16, "auto")
    assert len(built) == 1


def test_nothing_is_built_for_a_backend_that_will_be_refused(
    without_flashinfer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named by the user, but not installed, or on ROCm: `make_backend` says so."""
    monkeypatch.setattr("attention.backends.flashinfer.backend.start_building", lambda *args: pytest.fail("built"))
    key = AttentionSpec(8, 2, 64, 64, 0.125)
    begin_kernels("flashinfer", CUDA, [key], torch.bfloat16, "auto")
    monkeypatch.setattr("attention.backends.kinds.find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    begin_kernels("flashinfer", CUDA, [key], torch.bfloat16, "auto")


def test_on_rocm_kernels_are_launched_without_nvidias_option(rocm: None) -> None:
    """Triton for ROCm knows no `launch_pdl`, and `wait_for_predecessor` compiles to nothing."""
    pdl = pytest.importorskip("attention.kernels.launch", reason="Triton is not installed")
    assert pdl.dependent_launch.__wrapped__(CUDA) == {"DEPENDENT": False}
