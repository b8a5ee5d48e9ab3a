"""Adapters of peft: an object, a folder or one beside its base says what its PeftModel says; other kinds are named."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import TINY, enlarge, hf_greedy, hooks_of, random_prompts, table_head, tiny_llama, wrap
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import SamplingParams, SpeculativeModel
from specdec.errors import (
    InvalidInputError,
    ModelChangedError,
    ModelLoadError,
    SpecdecError,
    SpecdecWarning,
    UnsupportedModelError,
)
from specdec.loading.adapters import KINDS

peft: Any = pytest.importorskip("peft", reason="peft is not installed: pip install 'specdec-hf[peft]'")

NEW = 24
PROMPTS = random_prompts([7, 3, 11])
LINEAR = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
CONFIGS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: peft.LoraConfig(r=4, **LINEAR),
    "DoRA": lambda: peft.LoraConfig(r=4, use_dora=True, use_rslora=True, **LINEAR),
    "LoRA with an lm_head": lambda: peft.LoraConfig(r=4, modules_to_save=["lm_head"], **LINEAR),
    "IA3": lambda: peft.IA3Config(feedforward_modules=["down_proj"], **LINEAR),
    "VB-LoRA": lambda: peft.VBLoRAConfig(
        r=2, vector_length=8, num_vectors=8, topk=2, target_modules=["q_proj"], task_type="CAUSAL_LM"
    ),
    "tokens": lambda: peft.TrainableTokensConfig(
        token_indices=[1, 2, 3, 30], target_modules=["embed_tokens"], task_type="CAUSAL_LM"
    ),
}


def adapted(name: str = "LoRA", seed: int = 0) -> Any:
    """A PeftModel whose adapter changes what the model says."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(tiny_llama(), CONFIGS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def own(model: Any) -> list[list[int]]:
    """What the PeftModel's own generate says."""
    said = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0
        )
        said.append(out[0, len(prompt) :].tolist())
    return said


def ours(wrapped: Any) -> list[list[int]]:
    """The same of the wrapped model; with a head, some of its drafts were accepted."""
    said = wrapped.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))
    assert wrapped.head is None or sum(r.accepted for c in said for r in c.stats.rounds) > 0
    return [c.token_ids for c in said]


PLAIN = [hf_greedy(prompt, NEW) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(folder)
    return folder


def save(model: Any, folder: Path, base: Path | None) -> Path:
    """An adapter as peft writes it, whose configuration names its base."""
    for config in model.peft_config.values():
        config.base_model_name_or_path = None if base is None else str(base)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lora(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(adapted(), tmp_path_factory.mktemp("lora"), base)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LoRA", "LoRA with an lm_head", "IA3", "tokens"])
@pytest.mark.thorough
def test_an_object_says_what_its_own_generate_says(name: str) -> None:
    model = adapted(name)
    right = own(model)
    assert right != PLAIN, "the adapter changes nothing, so nothing is tested"
    with wrap(model, table_head(tiny_llama()), num_speculative_tokens=3) as wrapped:  # a head for the base
        assert ours(wrapped) == right and wrapped.hf_model is model.get_base_model()
        assert wrapped.describe()["adapter"] == "live: default"
    assert own(model) == right


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "merge"),
    [
        pytest.param("DoRA", "auto", id="merged-DoRA"),
        pytest.param("DoRA", False, id="live-DoRA", marks=pytest.mark.long),
        pytest.param("VB-LoRA", "auto", id="merged-VB-LoRA", marks=pytest.mark.long),
        pytest.param("VB-LoRA", False, id="live-VB-LoRA"),
        pytest.param("LoRA with an lm_head", "auto", id="merged-LoRA with an lm_head"),
        pytest.param("LoRA with an lm_head", False, id="live-LoRA with an lm_head", marks=pytest.mark.long),
    ],
)
@pytest.mark.thorough
def test_a_folder_and_an_adapter_beside_its_base(name: str, merge: Any, base: Path, tmp_path: Path) -> None:
    model = adapted(name)
    right, folder = own(model), save(model, tmp_path / "adapter", base)
    with wrap(str(folder), merge_adapter=merge) as wrapped:
        assert ours(wrapped) == right
        how, live = wrapped.describe()["adapter"], any("peft" in type(m).__module__ for m in wrapped.hf_model.modules())
        assert live is (merge is False) and how.endswith(", live" if live else ", merged") and str(base) in how
    head = table_head(tiny_llama())
    with wrap(base, head, num_speculative_tokens=3, adapter=folder, merge_adapter=merge) as wrapped:
        assert ours(wrapped) == right


@pytest.mark.slow
@pytest.mark.parametrize("layers", [["lm_head"], ["embed_tokens", "lm_head"]])
@pytest.mark.cases(1)
def test_an_adapter_of_tied_embeddings_is_not_merged(layers: list[str], tmp_path: Path) -> None:
    """peft would add the part of one of them to the weight of both."""
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**TINY | {"tie_word_embeddings": True, "num_hidden_layers": 2})).eval()
    enlarge(plain)
    plain.save_pretrained(tmp_path / "base")
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        model = peft.get_peft_model(plain, peft.LoraConfig(r=4, init_lora_weights=False, target_modules=layers)).eval()
    right, folder = own(model), save(model, tmp_path / "adapter", tmp_path / "base")
    with pytest.warns(UserWarning, match="tie_word_embeddings"), wrap(str(folder)) as wrapped:
        assert ours(wrapped) == right and wrapped.describe()["adapter"].endswith(", live")
    with pytest.warns(UserWarning), pytest.raises(ModelLoadError, match=r"lm_head.* another module uses too .*=False"):
        wrap(str(folder), merge_adapter=True)


def test_tokens_that_were_added_before_training_are_named(base: Path, tmp_path: Path) -> None:
    larger = tiny_llama()
    larger.resize_token_embeddings(72)
    model = peft.get_peft_model(
        larger, peft.LoraConfig(r=4, **LINEAR | {"modules_to_save": ["embed_tokens", "lm_head"]})
    )
    with pytest.warns(UserWarning, match="embedding layer has been resized"):
        folder = save(model, tmp_path, base)
    words = r"has embeddings of 72 tokens, and the base model 64: .* resize_token_embeddings\(72\)"
    with pytest.raises(ModelLoadError, match=words):
        wrap(str(folder))


@pytest.mark.slow
@pytest.mark.thorough
def test_a_built_in_target_with_its_own_head(tmp_path: Path) -> None:
    """By name, with draft="auto" and the tokenizer of the base."""
    from transformers import AutoModelForCausalLM

    from specdec.loading.names import builtin_path

    target = builtin_path("gsm-llama")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.25)
    folder = save(model, tmp_path / "adapter", target)
    sizes: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_model_len": 256,
        "num_speculative_tokens": 3,
        "device": "cpu",
        "dtype": "float32",
    }
    chat = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples does he have now?"}]
    with SpeculativeModel.from_pretrained(str(folder), "auto", **sizes) as wrapped:
        (said,) = wrapped.generate(chat, SamplingParams(max_new_tokens=24))
        assert sum(r.accepted for r in said.stats.rounds) > 0
    ids = torch.tensor([said.prompt_token_ids])
    right = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    assert said.token_ids == right[0, ids.shape[1] :].tolist()
    with model.disable_adapter():
        plain = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
    assert plain.tolist() != right.tolist(), "the adapter changes nothing, so nothing is tested"


SWITCHES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any] | None]] = {
    "switched": (lambda m: m.set_adapter("other"), lambda m: m.set_adapter("default")),
    "disabled": (lambda m: m.base_model.disable_adapter_layers(), lambda m: m.base_model.enable_adapter_layers()),
    "merged": (lambda m: m.merge_adapter(), lambda m: m.unmerge_adapter()),
    "scaled": (lambda m: first(m).scaling.update(default=9.0), lambda m: first(m).scaling.update(default=2.0)),
    "added": (lambda m: m.add_adapter("third", CONFIGS["LoRA"]()), None),
    "unloaded": (lambda m: m.unload(), None),
}


def first(model: Any) -> Any:
    return model.get_base_model().model.layers[0].self_attn.q_proj


@pytest.mark.slow
@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.cases(1)
def test_what_is_switched_after_loading_is_noticed(name: str) -> None:
    change, back = SWITCHES[name]
    model = adapted()
    torch.manual_seed(1)
    model.add_adapter("other", CONFIGS["LoRA"]())
    model.eval()
    assert first(model).scaling["default"] == 2.0
    with wrap(model) as wrapped:
        right = ours(wrapped)
        change(model)
        with pytest.raises(ModelChangedError, match=r"adapter.*wrap it again"):
            ours(wrapped)
        if back is not None:
            back(model)
            assert ours(wrapped) == right


@pytest.mark.slow
@pytest.mark.thorough
def test_new_values_of_an_adapter_are_used() -> None:
    model = adapted()
    with wrap(model, table_head(tiny_llama()), num_speculative_tokens=3) as wrapped:
        before = ours(wrapped)
        with torch.no_grad():
            first(model).lora_B["default"].weight.mul_(-1)
        right = own(model)
        assert right != before and ours(wrapped) == right


PROMPT: dict[str, tuple[Callable[[], Any], str]] = {
    "prompt tuning": (
        lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        "PROMPT_TUNING puts trained vectors before the prompt",
    ),
    "prefix tuning": (
        lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        "PREFIX_TUNING puts trained keys and values into the model's cache",
    ),
    "p-tuning": (
        lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, task_type="CAUSAL_LM"),
        "P_TUNING puts trained vectors before the prompt",
    ),
    "activated LoRA": (
        lambda: peft.LoraConfig(r=4, alora_invocation_tokens=[1, 2], **LINEAR),
        "LORA is switched on by tokens of the prompt",
    ),
}


@pytest.mark.parametrize("name", PROMPT)
def test_kinds_that_change_inputs_or_cache_are_named(name: str, base: Path, tmp_path: Path) -> None:
    make, words = PROMPT[name]
    model = peft.get_peft_model(tiny_llama(), make()).eval()
    hooks = [hooks_of(m) for m in model.modules()]
    with pytest.raises(UnsupportedModelError, match=words):
        wrap(model)
    assert [hooks_of(m) for m in model.modules()] == hooks
    folder = save(model, tmp_path, base)
    with pytest.raises(UnsupportedModelError, match=words):
        wrap(str(folder))
    with pytest.raises(UnsupportedModelError, match=words):
        wrap(base, adapter=folder)


def test_every_other_kind_is_named(lora: Path, tmp_path: Path) -> None:
    known = {kind.value for kind in peft.PeftType}
    assert known >= KINDS
    for kind in known - KINDS:
        config = json.loads((lora / "adapter_config.json").read_text()) | {"peft_type": kind}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        with pytest.raises(UnsupportedModelError, match=f"peft_type {kind} "):
            wrap(str(tmp_path))


def without(part: str) -> Callable[[Path], None]:
    """Take tensors out of an adapter's file."""

    def edit(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        save_file({n: t for n, t in tensors.items() if part not in n}, folder / "adapter_model.safetensors")

    return edit


def deeper(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    more = {n.replace("layers.0", "layers.9"): t.clone() for n, t in tensors.items() if "layers.0" in n}
    save_file(tensors | more, folder / "adapter_model.safetensors")


def wider(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({n: torch.cat([t, t]) for n, t in tensors.items()}, folder / "adapter_model.safetensors")


def config(**values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return edit


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "tensors missing": (without("layers.1"), "6 tensors are missing from it .*another base model"),
    "tensors of other modules": (deeper, "6 of its tensors belong to modules that the model does not have"),
    "another shape": (wider, "size mismatch"),
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "cannot load the adapter"),
    "no base": (config(base_model_name_or_path=None), "names no base model .*give the base as the target and adapter="),
    "a base that is nowhere": (config(base_model_name_or_path="./nowhere"), "the base model of .*nowhere"),
    "other modules": (config(target_modules=["nosuch"]), "cannot load the adapter.*nosuch"),
    "no kind": (config(peft_type=None), "has no peft_type"),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{{"), "cannot be read as JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_adapter(name: str, lora: Path, tmp_path: Path) -> None:
    edit, words = BAD[name]
    folder = tmp_path / "adapter"
    shutil.copytree(lora, folder)
    edit(folder)
    with pytest.raises(ModelLoadError, match=words):
        wrap(str(folder))


def test_what_does_not_go_together(lora: Path, base: Path, tmp_path: Path) -> None:
    def refused(kind: type[SpecdecError], words: str, target: Any, **options: Any) -> None:
        with pytest.raises(kind, match=words):
            wrap(target, **options)

    refused(InvalidInputError, "is an adapter itself", str(lora), adapter=str(lora))
    refused(InvalidInputError, "merge_adapter=False: there is no adapter", base, merge_adapter=False)
    refused(ModelLoadError, "has no adapter_config.json", base, adapter=base)
    refused(ModelLoadError, "cannot load the adapter '/nowhere'", base, adapter="/nowhere")
    refused(InvalidInputError, "adapter=3: allowed is the folder or hub name of an adapter", base, adapter=3)
    for model in (tiny_llama(), adapted()):
        refused(InvalidInputError, "the model is loaded already; give peft.PeftModel", model, adapter=str(lora))
    mixed = tmp_path / "mixed"
    shutil.copytree(base, mixed)
    shutil.copy(lora / "adapter_config.json", mixed)
    refused(ModelLoadError, r"holds a model \(model.safetensors\) and an adapter", mixed)
    training = adapted().train()
    refused(InvalidInputError, "training mode", training)


@pytest.mark.slow
@pytest.mark.parametrize(("trained_on", "told"), [("owner/other-model", True), ("owner/Base", False), (None, False),
                                                  ("/cache/snapshots/" + "0a" * 20, False)])  # fmt: skip
@pytest.mark.cases(1)
def test_an_adapter_of_another_base_is_told(trained_on: str | None, told: bool, tmp_path: Path) -> None:
    """Its sizes fit, and nothing else could tell."""
    model = adapted()
    tiny_llama().save_pretrained(tmp_path / "base")
    folder = save(model, tmp_path / "adapter", None if trained_on is None else Path(trained_on))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        wrap(tmp_path / "base", adapter=folder).close()
    words = [
        str(w.message) for w in found if issubclass(w.category, SpecdecWarning) and "was trained on" in str(w.message)
    ]
    assert len(words) == told and all("'owner/other-model'" in w and "base'" in w for w in words)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_bias_that_cannot_be_merged_runs_live(base: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, init_lora_weights=False, lora_bias=True, **LINEAR)
    model = peft.get_peft_model(tiny_llama(), config).eval()
    folder = save(model, tmp_path, base)
    with pytest.raises(ModelLoadError, match=r"cannot merge the adapter .*lora_bias.*give merge_adapter=False"):
        wrap(str(folder))
    with wrap(str(folder), merge_adapter=False) as wrapped:
        assert ours(wrapped) == own(model)


def test_without_the_package(lora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelLoadError, match=r"the package peft is needed .*pip install \"specdec-hf\[peft\]\""):
        wrap(str(lora))
