"""Quantised checkpoints say what the same quantised model's own generate says; what cannot be is refused by name."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import random_prompts, table_head, wrap
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specdec import SamplingParams
from specdec.errors import ModelLoadError, SpecdecWarning, UnsupportedModelError
from specdec.loading import quantisation
from tests.fakes import load_target
from tests.quantised import add_tensors, make, mxfp4, need, own_model, plain_llama, quanto, settings

NEW = 16
PROMPTS = random_prompts((7, 3, 11))
DEQUANTISED = ("compressed-tensors int4", "compressed-tensors fp8")
EXACT = (*DEQUANTISED, "torchao int8", "quanto int8", "bitsandbytes nf4", "bitsandbytes int8")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that are made already, by name."""
    return {"": tmp_path_factory.mktemp("quantised")}


def checkpoint(folders: dict[str, Path], name: str) -> Path:
    if name not in folders:
        folders[name] = make(name, folders[""] / name.replace(" ", "-"))
    return folders[name]


def own(model: Any) -> list[list[int]]:
    said = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        said.append(out[0, len(prompt) :].tolist())
    return said


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([PROMPTS[2]]), use_cache=False).logits[0]


def ours(wrapped: Any) -> list[list[int]]:
    said = wrapped.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))
    assert wrapped.head is None or sum(r.accepted for c in said for r in c.stats.rounds) > 0
    return [c.token_ids for c in said]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in ("compressed-tensors fp8", EXACT[-1]) else n for n in EXACT],
)
@pytest.mark.thorough
def test_what_the_quantised_model_says(name: str, folders: dict[str, Path]) -> None:
    folder = checkpoint(folders, name)
    model = own_model(folder)
    said, right = own(model), logits(model)
    assert (right - logits(plain_llama())).abs().max() > 1e-3, "the model that was not quantised would show"
    head = table_head(model, 0.1, aux_layers=(1, 2, 3))
    for target, k in ((folder, 3), (model, 0)):
        if name in DEQUANTISED:
            with pytest.warns(SpecdecWarning, match="compressed-tensors .* run dequantised in float32"):
                wrapped = wrap(target, head if k else None, num_speculative_tokens=k)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("error", SpecdecWarning)
                wrapped = wrap(target, head if k else None, num_speculative_tokens=k)
        with wrapped:
            assert ours(wrapped) == said
            assert torch.equal(logits(wrapped.hf_model), right)
            found = wrapped.describe()["quantisation"]
            by_class = target is model and name.startswith("quanto")  # such a model's configuration says nothing
            assert found["method"].startswith("QLinear of Weight" if by_class else name.split()[0])
            assert found["runs"].startswith("dequantised in float32" if name in DEQUANTISED else "as stored")
            assert found["layers"].startswith("21 ")
    assert own(model) == said, "the model's own generate is as before"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n not in ("torchao int8", *DEQUANTISED[:1]))) for n in EXACT]
)
@pytest.mark.cases(1)
def test_half_precision(name: str, folders: dict[str, Path]) -> None:
    """What is not quantised is in the dtype asked for, and logits come in it, near those of the same model in float32,
    whose best each token is, or nearly."""
    folder = checkpoint(folders, name)
    model = own_model(folder)
    right = logits(model)
    for dtype, limit in ((torch.bfloat16, 0.06), (torch.float16, 0.03)):
        with wrap(folder, dtype=dtype) as wrapped:
            loaded = wrapped.hf_model
            plain = [m.weight for n, m in loaded.named_modules() if n.endswith(("norm", "embed_tokens", "lm_head"))]
            assert {p.dtype for p in plain} == {dtype} and loaded.model.rotary_emb.inv_freq.dtype == torch.float32
            found = logits(loaded)
            assert found.dtype == dtype and (found - right).norm() / right.norm() < limit
            answers = ours(wrapped)
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            with torch.no_grad():
                read = model(input_ids=torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            gaps = read.max(-1).values - read.gather(1, torch.tensor(answer)[:, None])[:, 0]
            assert float((gaps / read.std(-1)).max()) < 3 * limit


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where "auto" is the checkpoint's dtype."""
    monkeypatch.setattr("specdec.loading.targets.dtype_on", lambda device, config, plain: "auto")


@pytest.mark.usefixtures("as_on_a_gpu")
def test_scales_of_quanto_that_a_dtype_cannot_hold_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight._scale"
    shutil.copytree(checkpoint(folders, "quanto int8"), tmp_path, dirs_exist_ok=True)
    for scale in (1e-9, 1e6):
        add_tensors(tmp_path, {name: torch.full((64, 1), scale)})
        with pytest.raises(ModelLoadError, match=r"dtype=float16 cannot hold the scales .*up_proj.*'bfloat16'"):
            wrap(tmp_path, dtype="float16")
    with pytest.raises(ModelLoadError, match=r"dtype=float16 cannot hold"):
        settings(tmp_path, dtype="float16")
        load_target(str(tmp_path), "auto", torch.device("cpu"))


@pytest.mark.long  # quanto compiles an extension in C++ for it, once an environment
def test_quanto_in_4_bits_is_refused(tmp_path: Path) -> None:
    need("quanto")
    quanto(tmp_path, weights="qint4")
    model = own_model(tmp_path)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="version_counter"):  # once it runs, serve it
        model(input_ids=torch.tensor([PROMPTS[0]]))
    with pytest.raises(UnsupportedModelError, match="version_counter"):
        wrap(model)
    with pytest.raises(ModelLoadError, match=r"weights are in qint4.*inference mode.*qint8 or qfloat8"):
        wrap(tmp_path)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("stored", [torch.bfloat16, None])
@pytest.mark.cases(1)
def test_quanto_in_the_dtype_that_is_stored(stored: torch.dtype | None, tmp_path: Path) -> None:
    """dtype="auto", as on a GPU: of the model that was quantised, by its configuration, or by its scales."""
    need("quanto")
    quanto(tmp_path, torch.bfloat16)
    settings(tmp_path, dtype=None if stored is None else "bfloat16")
    for dtype in (torch.bfloat16, torch.float32):
        model = load_target(str(tmp_path), "auto" if dtype is torch.bfloat16 else dtype, torch.device("cpu"))
        assert logits(model).dtype == model.lm_head.weight.dtype == dtype


@pytest.mark.slow
@pytest.mark.parametrize("name", ("torchao int8", "quanto int8", "bitsandbytes nf4", "bitsandbytes int8"))
@pytest.mark.cases(1)
def test_bytes_are_those_of_the_file(name: str, folders: dict[str, Path]) -> None:
    folder = checkpoint(folders, name)
    tensors = load_file(folder / "model.safetensors")
    stored = sum(t.nbytes for n, t in tensors.items() if not n.endswith(("quant_map", "nf4", "weight_format")))
    with wrap(folder) as wrapped:
        facts = wrapped.describe()
    assert 0.98 * stored < facts["weights_bytes"] < 1.02 * stored
    assert facts["weights_bytes"] < 0.5 * sum(p.nbytes for p in plain_llama().parameters())
    assert facts["parameters"] == sum(p.numel() for p in plain_llama().parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, words",
    {
        "torchao int8, per tensor": "scaled by the largest one of the whole tensor, at every call",
        "bitsandbytes LLM.int8": r"llm_int8_threshold=6; load the model with llm_int8_threshold=0\.0",
    }.items(),
)
@pytest.mark.cases(1)
def test_results_that_depend_on_the_batch_are_refused(name: str, words: str, folders: dict[str, Path]) -> None:
    folder = checkpoint(folders, name)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(
            UnsupportedModelError, match=rf"depends on what else is in the batch: model\.layers.*{words}"
        ):
            wrap(folder, dtype=dtype)


@pytest.mark.slow
def test_activations_that_are_rounded_are_allowed_a_step(folders: dict[str, Path]) -> None:
    """Rows of their own scales: no token depends on another, but a value between two steps goes to either."""
    with wrap(checkpoint(folders, "compressed-tensors int8")) as wrapped:
        assert wrapped.self_test_error < 0.05
        assert wrapped.describe()["quantisation"]["activations"].startswith("rounded at every call")


@pytest.mark.slow
def test_mxfp4_is_dequantised_on_a_cpu_and_says_so(tmp_path: Path) -> None:
    mxfp4(tmp_path)
    settings_given = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=_dequantising(), attn_implementation="eager"
    )
    said = own(reference)
    for k in (0, 3):
        with pytest.warns(
            SpecdecWarning, match=r"quantised by mxfp4, and run dequantised in float32.*CUDA devices only"
        ):
            wrapped = wrap(
                tmp_path, table_head(reference, aux_layers=(0, 1, 2)) if k else None, num_speculative_tokens=k
            )
        with wrapped:
            assert ours(wrapped) == said
            found = wrapped.describe()["quantisation"]
    assert found == {
        "method": settings_given["quant_method"],
        "scheme": None,
        "runs": "dequantised in float32: transformers has MXFP4 kernels for CUDA devices only, not for cpu",
        "layers": None,
        "activations": "not rounded",
    }


def _dequantising() -> Any:
    from transformers import Mxfp4Config

    return Mxfp4Config(dequantize=True)


METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "gptq": ({"bits": 4, "group_size": 128}, r"gptqmodel>=1\.4\.3, optimum>=1\.24\.0"),
    "awq": ({"bits": 4, "group_size": 128}, r"gptqmodel>=1\.4\.3"),
    "compressed-tensors": ({"format": "pack-quantized"}, r"compressed-tensors>=0\."),
    "torchao": ({"quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, r"torchao>=0\."),
    "bitsandbytes": ({"load_in_4bit": True}, r"bitsandbytes>=0\.\d+\.\d, accelerate>="),
    "quanto": ({"weights": "int8"}, "optimum-quanto"),
    "hqq": ({}, "hqq>="),
    "aqlm": ({}, "aqlm"),
    "fbgemm_fp8": ({}, "fbgemm-gpu"),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_missing_package_is_named_before_weights_are_read(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_llama().config.save_pretrained(tmp_path)  # no weights: nothing heavy can have happened
    options, words = METHODS[method]
    settings(tmp_path, quantization_config={"quant_method": method, **options})
    monkeypatch.setattr(quantisation, "_is_importable", lambda module: False)
    with pytest.raises(ModelLoadError, match=rf"quant_method {method}\S* needs the packages? .*{words}.*: pip install"):
        wrap(tmp_path)


def test_an_old_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_llama().config.save_pretrained(tmp_path)
    settings(tmp_path, quantization_config={"quant_method": "torchao"})
    monkeypatch.setattr(quantisation, "_is_importable", lambda module: True)
    monkeypatch.setattr(quantisation.importlib.metadata, "version", lambda name: "0.1.0")
    with pytest.raises(ModelLoadError, match=r"needs the package torchao>=0\.\d+\.\d: pip install 'torchao>="):
        wrap(tmp_path)


def test_quanto_by_transformers_configuration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_llama().save_pretrained(tmp_path)
    settings(tmp_path, quantization_config={"quant_method": "quanto", "weights": "int8"})
    monkeypatch.setattr(quantisation, "_is_importable", lambda module: True)
    with pytest.raises(ModelLoadError, match=r"quantises to but cannot read back.*QuantizedModelForCausalLM"):
        wrap(tmp_path)


@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json"])
def test_weights_of_modelopt_are_named(where: str, tmp_path: Path) -> None:
    plain_llama().save_pretrained(tmp_path)
    if where == "config.json":
        settings(tmp_path, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    else:
        said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
        (tmp_path / where).write_text(json.dumps(said))
    with pytest.raises(
        ModelLoadError, match=r"quantised by NVIDIA ModelOpt .quant_algo 'FP8'., which transformers cannot"
    ):
        wrap(tmp_path)


def test_scales_of_weights_that_nothing_reads_are_refused(tmp_path: Path) -> None:
    plain_llama().save_pretrained(tmp_path)
    add_tensors(tmp_path, {"model.layers.1.mlp.up_proj.weight_scale": torch.tensor(0.5)})
    with pytest.raises(
        ModelLoadError, match=r"1 tensor of quantised weights .scales, packed numbers. that nothing reads"
    ):
        wrap(tmp_path)


@pytest.mark.parametrize("change", ["a missing tensor", "a layer that is not there", "a damaged map"])
def test_a_damaged_quanto_folder_is_refused(change: str, tmp_path: Path) -> None:
    folder, file = make("quanto int8", tmp_path), tmp_path / "quanto_qmap.json"
    layers = json.loads(file.read_text())
    if change == "a missing tensor":
        from safetensors.torch import save_file

        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight._data"]
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file.write_text(
        "{{"
        if change == "a damaged map"
        else json.dumps(layers | ({} if "tensor" in change else {"no": {"weights": "qint8", "activations": "none"}}))
    )
    words = {
        "a missing tensor": r"1 tensor missing.*layers\.1\.mlp\.up_proj\.weight",
        "a damaged map": "cannot be read as JSON",
    }
    with pytest.raises(ModelLoadError, match=words.get(change, "names layers that the model does not have: no")):
        wrap(folder)
