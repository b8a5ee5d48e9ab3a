"""What a user can get wrong when a model is loaded: each has an error that names it, and says what to do."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import LetterTokenizer, eagle3_head, hf_greedy, table_head, tiny_llama, wrap
from safetensors import safe_open

from specdec import SamplingParams, SpecdecError, SpeculativeModel
from specdec.errors import HeadLoadError, InvalidInputError, ModelLoadError, UnsupportedModelError

LACKING = ("weights_only", "token=", "ignore_mismatched_sizes", "from_tf", "use_auth_token")
"""Options of other libraries that this one does not have: no message may recommend them."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny_llama().save_pretrained(folder)
    return folder


def load(target: Any, **options: Any) -> SpeculativeModel:
    return wrap(target, options.pop("draft", None), **options)


def refused(kind: type[SpecdecError], words: str, target: Any, **options: Any) -> str:
    with pytest.raises(kind, match=words) as caught:
        load(target, **options)
    message = str(caught.value)
    assert not [option for option in LACKING if option in message], message
    assert len(message) < 1500
    return message


class Malicious:
    """A pickle that would make a file when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def settings(**values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return edit


def content(name: str, data: bytes) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return edit


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def only(*files: tuple[str, bytes]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        for entry in folder.iterdir():
            entry.unlink()
        for name, data in files:
            (folder / name).write_bytes(data)

    return edit


def pickled(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        torch.save(make(folder), folder / "pytorch_model.bin")

    return edit


def sharded(index: bytes) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_bytes(index)

    return edit


def renamed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors").rename(folder / name) and None


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "nobody/nothing", "peft_type": "LORA"}')


def piped(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return edit


def away(place: str) -> Callable[[Path], None]:
    """Weights whose index names them at another place, {} being the folder above."""

    def edit(folder: Path) -> None:
        file, where = folder / "model.safetensors", place.format(folder.parent)
        with safe_open(file, "pt") as weights:
            index = {"metadata": {}, "weight_map": dict.fromkeys(weights.keys(), where)}
        file.rename(folder.parent / "away.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return edit


NESTED = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
PIPES = {
    f"a pipe as {name}": (piped(name), f"{name} in it is a named pipe, not a file")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin")
}
REMOTE = {"AutoConfig": "x.Y", "AutoModelForCausalLM": "x.Z"}
FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "shapes": (
        settings(hidden_size=48),
        r"lm_head.weight: \[64, 32\] in the checkpoint, \[64, 48\] by the configuration",
    ),
    "a configuration of a wrong type": (settings(num_attention_heads="four"), "num_attention_heads"),
    "an activation nobody knows": (settings(hidden_act="nosuch"), "configuration or weight files.*nosuch"),
    "truncated weights": (cut, "damaged or incomplete.*download it again"),
    "weights that are none": (content("model.safetensors", b"hello" * 9), "damaged or incomplete.*download it again"),
    "empty weights": (content("model.safetensors", b""), "damaged or incomplete.*download it again"),
    "a malicious pickle": (pickled(lambda f: {"x": Malicious(f / "made")}), "could run code and is never read"),
    "a pickle of something else": (pickled(lambda _: [1, 2]), "weight files is wrong"),
    "a shard that is missing": (
        sharded(b'{"metadata": {}, "weight_map": {"a": "no.safetensors"}}'),
        "1 of 1 files .*no.safetensors.*download",
    ),
    "an index that is none": (sharded(b"{{"), "index.json cannot be read as JSON"),
    "an index without a map": (sharded(b"{}"), "index.json has no weight_map .*download it again"),
    "shards without an index": (renamed("model-00001-of-00002.safetensors"), "shards .* and no index of them"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"it has no weights \(.*; it holds \['config.json'"),
    "weights in GGUF": (renamed("model.gguf"), r"its weights are GGUF files: give gguf_file=….*model.gguf"),
    "Mistral's own format": (renamed("consolidated.safetensors"), "consolidated.safetensors.* maker's own format"),
    "pointers of git-lfs": (
        content("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "1 of 1 files of its weights are git-lfs pointers.*git lfs pull",
    ),
    "no configuration": (lambda f: (f / "config.json").unlink(), "has no config.json; it holds"),
    "a configuration that is no JSON": (content("config.json", b"{{"), "config.json cannot be read as JSON"),
    "a configuration of other bytes": (content("config.json", b"\xff\xfe\0"), "config.json cannot be read as JSON"),
    "a configuration that is a list": (content("config.json", b"[1]"), "must hold a JSON object, not a list"),
    "a configuration without a type": (content("config.json", b"{}"), "has no model_type"),
    "a model type nobody knows": (settings(model_type="nosuch"), "model_type='nosuch', which transformers .* does not"),
    "generation settings that are no JSON": (content("generation_config.json", b"{{"), "generation_config.json cannot"),
    "generation settings that are a list": (
        content("generation_config.json", b"[1]"),
        "must hold a JSON object, not a list",
    ),
    "code of its own": (settings(model_type="nosuch", auto_map=REMOTE), "trust_remote_code=True"),
    "an encoder": (settings(model_type="bert"), "causal language models are supported.*'bert' is an encoder"),
    "an image model": (settings(model_type="vit"), "causal language models are supported.*'vit'"),
    "an encoder and decoder": (settings(model_type="t5"), "'t5' is an encoder and a decoder"),
    "GPTQ": (
        settings(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128}),
        "gptqmodel.*optimum",
    ),
    "AWQ": (settings(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128}), "gptqmodel"),
    "a quantisation nobody knows": (settings(quantization_config={"quant_method": "nosuch"}), "nosuch.*does not know"),
    "a quantisation that is none": (settings(quantization_config=3), "quantization_config=3"),
    "an adapter beside a model": (adapter, "adapter.*merge_and_unload"),
    "an adapter": (only(("adapter_config.json", b"{}"), ("adapter_model.safetensors", b"")), "has no peft_type"),
    "a GGUF file that is none": (only(("model.gguf", b"GGUF")), "download the GGUF file again"),
    "nothing": (only(), "the folder is empty"),
    **PIPES,
    "a pipe as an index": (
        lambda f: (f / "model.safetensors").unlink() or piped("model.safetensors.index.json")(f),
        "index.json in it is a named pipe",
    ),
    "weights above the folder": (away("../away.safetensors"), r"files outside of its folder \(\['../away"),
    "weights at an absolute path": (away("{}/away.safetensors"), "files outside of its folder"),
    "a configuration nested deep": (content("config.json", NESTED), "config.json cannot be read as JSON: .*recursion"),
    "an index nested deep": (sharded(NESTED), "index.json cannot be read as JSON: .*recursion"),
    "a configuration of a wrong kind": (
        settings(model_type="csm_depth_decoder_model", tie_word_embeddings=True),
        r"`tie_word_embeddings=True` is not supported for Csm",
    ),
    "a million layers": (settings(num_hidden_layers=10**6), "num_hidden_layers=1000000; at most 1024"),
    "a million layers in a part": (settings(text_config={"num_layers": 10**6}), "num_layers=1000000; at most 1024"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_is_no_target(name: str, saved: Path, tmp_path: Path) -> None:
    edit, words = FOLDERS[name]
    folder = tmp_path / "target"
    shutil.copytree(saved, folder)
    edit(folder)
    message = refused(ModelLoadError, f"cannot load the target model.*(?s:{words})", folder)
    assert str(folder) in message
    assert not (folder / "made").exists(), "nothing of a pickle was run"


@pytest.mark.slow
def test_a_pickle_of_plain_tensors_is_loaded(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(saved, folder)
    pickled(lambda _: tiny_llama().state_dict())(folder)
    (completion,) = load(folder).generate([1, 2, 3], SamplingParams(max_new_tokens=4))
    assert completion.token_ids == hf_greedy([1, 2, 3], 4)


@pytest.mark.parametrize("name", ["./nothing", "/abs/nothing", "folder/that/looks/local", "~/nothing", "..\\nothing"])
@pytest.mark.parametrize("what", ["target", "draft", "tokenizer"])
def test_a_missing_folder_is_called_one_and_not_asked_of_the_hub(what: str, name: str) -> None:
    options = {"target": tiny_llama(), what: name}
    with pytest.raises((ModelLoadError, HeadLoadError), match="there is no folder") as caught:
        load(options.pop("target"), **options)
    assert "nothing" in str(caught.value) or "local" in str(caught.value)
    assert "hub gave" not in str(caught.value)


def test_a_folder_without_a_tokenizer(saved: Path) -> None:
    """transformers recommends to install sentencepiece."""
    words = r"the folder has none \(tokenizer.json.*give tokenizer="
    with pytest.raises(ModelLoadError, match=f"cannot load the tokenizer of .*{words}"):
        SpeculativeModel.from_pretrained(str(saved), device="cpu")


def test_a_folder_without_a_tokenizer_gets_no_empty_one(tmp_path: Path) -> None:
    """transformers makes one of no tokens for some kinds of models."""
    from transformers import AutoTokenizer

    from specdec.loading.tokenizers import load_tokenizer

    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    assert len(AutoTokenizer.from_pretrained(tmp_path)) <= 1
    with pytest.raises(ModelLoadError, match="the folder has none"):
        load_tokenizer(tmp_path)


def test_a_file_is_no_folder(saved: Path) -> None:
    refused(ModelLoadError, "it is a file", saved / "config.json")
    refused(HeadLoadError, "is a file", tiny_llama(), draft=saved / "config.json")


def test_a_head_is_no_target_and_a_target_no_head(saved: Path) -> None:
    refused(ModelLoadError, "it is a draft head.*give it as draft", "gsm-llama-eagle3")
    refused(HeadLoadError, "a whole language model: give it as the target", saved, draft=saved)


HEADS: dict[str, tuple[Callable[[Path], None], str]] = {
    "an index without a map": (sharded(b"{}"), "no weight_map"),
    "an index of a wrong map": (sharded(b'{"weight_map": [1]}'), "no weight_map"),
    "truncated weights": (cut, "no readable safetensors file"),
    "a malicious pickle": (pickled(lambda f: {"x": Malicious(f / "made")}), "could run code and is never read"),
    "a damaged pickle": (only(("config.json", b"{}"), ("pytorch_model.bin", b"xx")), "pytorch_model.bin"),
    "a pipe as its weights": (piped("model.safetensors"), "model.safetensors in it is a named pipe, not a file"),
    "a pipe as its configuration": (piped("config.json"), "config.json in it is a named pipe, not a file"),
    "a configuration nested deep": (content("config.json", NESTED), "config.json cannot be read as JSON: .*recursion"),
    "an index nested deep": (sharded(NESTED), "index.json cannot be read as JSON: .*recursion"),
    "weights above the folder": (away("../away.safetensors"), "files outside of its folder"),
    "weights at an absolute path": (away("{}/away.safetensors"), "files outside of its folder"),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_damaged_head(name: str, saved: Path, tmp_path: Path) -> None:
    edit, words = HEADS[name]
    folder = tmp_path / "head"
    shutil.copytree(saved, folder)
    edit(folder)
    refused(HeadLoadError, words, tiny_llama(), draft=folder)
    assert not (folder / "made").exists(), "nothing of a pickle was run"


class PeftMixedModel(torch.nn.Module):
    """Called like peft's."""


OBJECTS: dict[str, tuple[Callable[[], Any], type[SpecdecError], str]] = {
    "compiled": (lambda: torch.compile(tiny_llama()), InvalidInputError, "compiled by torch.compile; give the model"),
    "parallel": (lambda: torch.nn.DataParallel(tiny_llama()), InvalidInputError, "DataParallel; give the model inside"),
    "peft": (PeftMixedModel, InvalidInputError, "adapters of several kinds; give what its merge_and_unload"),
    "a module": (lambda: torch.nn.Sequential(tiny_llama()), InvalidInputError, "plain torch module"),
    "a representation": (lambda: repr(tiny_llama()), ModelLoadError, "no folder of that name, and the hub has no such"),
    "no output layer": (lambda: tiny_llama().model, UnsupportedModelError, "LlamaModel has no output layer"),
    "meta": (lambda: tiny_llama().to("meta"), InvalidInputError, "'meta' and have no values"),
    "a class": (lambda: type(tiny_llama()), InvalidInputError, "is no model; give"),
    "none": (lambda: None, InvalidInputError, "target=None .* is no model; give"),
    "a number": (lambda: 3, InvalidInputError, "target=3 .* is no model; give"),
    "bytes": (lambda: b"gsm-llama", InvalidInputError, "is no model; give"),
    "empty": (lambda: "", ModelLoadError, "the name is empty"),
    "another zero": (lambda: "a\0b", ModelLoadError, "no folder of that name"),
    "huge": (lambda: "a" * 10**5, ModelLoadError, "no folder of that name"),
    "wrapped already": (lambda: wrap(tiny_llama()), InvalidInputError, "a SpeculativeModel already; give its hf_model"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_is_no_target(name: str) -> None:
    make, kind, words = OBJECTS[name]
    refused(kind, words, make())


def test_a_loaded_encoder_and_decoder_is_named() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=64, **sizes)).eval()
    refused(UnsupportedModelError, "an encoder and a decoder; causal", model)


DRAFTS: dict[str, tuple[Callable[[], Any], str]] = {
    "a number": (lambda: 3, "draft=3 .* is no draft head"),
    "a model of other tokens": (lambda: tiny_llama(32), "has a vocabulary of 32 tokens, the target 64"),
    "a module": (lambda: torch.nn.Linear(2, 2), "is no draft head"),
    "a class": (lambda: type(table_head(tiny_llama())), "is no draft head"),
    "a list": (list, r"draft=\[\] .* is no draft head"),
    "another dtype": (lambda: eagle3_head(tiny_llama()).bfloat16(), "is bfloat16 on cpu, the target float32 on cpu"),
    "another device": (lambda: eagle3_head(tiny_llama()).to("meta"), "float32 on meta, the target float32 on cpu"),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_an_object_that_is_no_head(name: str) -> None:
    make, words = DRAFTS[name]
    refused(InvalidInputError, words, tiny_llama(), draft=make())


NAMES: dict[str, tuple[dict[str, Any], str]] = {
    "meta": ({"device": "meta"}, "device='meta': CPU and CUDA are supported"),
    "mps": ({"device": "mps"}, "device='mps': CPU and CUDA are supported"),
    "no device": ({"device": "gpu7"}, "device='gpu7' is not a torch device: allowed are cpu"),
    "a list as device": ({"device": []}, r"device=\[\].*allowed are cpu"),
    "cuda 99": ({"device": "cuda:99"}, "device='cuda:99': .*allowed are cpu"),
    "index 99": ({"device": 99}, "device=99: .*allowed are cpu"),
    "dtype": ({"dtype": "flot"}, "dtype='flot': allowed are auto, float32, bfloat16, float16, float64"),
    "8 bits": ({"dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn': allowed are auto, float32"),
    "integers": ({"dtype": "int8"}, "dtype='int8': allowed are auto"),
    "not a dtype": ({"dtype": "nn"}, "dtype='nn': allowed are auto"),
    "a number as dtype": ({"dtype": 3}, "dtype=3: allowed are auto"),
    "no dtype": ({"dtype": None}, "dtype=None: allowed are auto"),
    "revision of a folder": ({"revision": "v1"}, "revision='v1': .*only models on the hub have revisions"),
    "a number as revision": ({"revision": 3}, "revision=3: allowed is a branch, tag or commit"),
    "trust": ({"trust_remote_code": "no"}, "trust_remote_code='no': allowed are True and False"),
}


@pytest.mark.parametrize("name", NAMES)
def test_where_and_how_a_target_is_loaded(name: str, saved: Path) -> None:
    options, words = NAMES[name]
    refused(InvalidInputError, words, saved, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:7", torch.device("cuda", 1)])
def test_cuda_where_there_is_none(device: Any, saved: Path) -> None:
    refused(InvalidInputError, "torch finds no CUDA device", saved, device=device)


SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"max_model_len": 10**15}, "max_model_len=1000000000000000: .* GiB.*; lower"),
    "rows": ({"max_num_seqs": 10**9, "max_num_batched_tokens": 10**10}, "max_num_seqs=1000000000.*GiB"),
    "no rows": ({"max_num_seqs": 0}, "max_num_seqs=0: allowed is 1 or more"),
    "text rows": ({"max_num_seqs": "3"}, r"max_num_seqs='3' \(str\): allowed is a whole number, 1 or more"),
    "half a page": ({"page_size": 3.5}, r"page_size=3.5 \(float\): allowed is a whole number, 1 or more"),
    "a huge page": ({"page_size": 10**12}, "page_size=1000000000000: a page is longer than a request.*256 or less"),
    "a page longer than requests": ({"page_size": 300, "max_model_len": 100}, "page_size=300: .*max_model_len=100"),
    "more rows than tokens": ({"max_num_seqs": 10**9}, "max_num_batched_tokens=24: 1000000000 requests"),
    "many": ({"kv_cache_tokens": "many"}, r"kv_cache_tokens='many' \(str\): allowed is a whole number"),
    "a huge cache": ({"kv_cache_tokens": 10**15}, "kv_cache_tokens=1000000000000000 takes .* GiB.*room for"),
    "beyond 64 bits": ({"kv_cache_tokens": 10**30}, "kv_cache_tokens=10{30}: allowed is 1 … 9223372036854775807"),
    "beyond all print": ({"kv_cache_tokens": 10**5000}, "kv_cache_tokens=<an integer of 16610 bits>: allowed is 1 …"),
    "no page": ({"page_size": None}, r"page_size=None \(NoneType\): allowed is a whole"),
    "a huge batch": ({"max_num_batched_tokens": 10**15}, "max_num_batched_tokens=1000000000000000.*GiB"),
    "share": ({"gpu_memory_utilization": 7}, "gpu_memory_utilization=7: allowed is more than 0, at most 1"),
    "nan": ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization=nan: allowed is more than 0, at most 1"),
    "text share": ({"gpu_memory_utilization": "a"}, "gpu_memory_utilization='a': allowed is more than 0, at most 1"),
    "negative k": ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1: allowed is 0 or more"),
    "huge k": ({"num_speculative_tokens": 10**6}, "3 requests with 1000000 drafts"),
    "true k": ({"num_speculative_tokens": True}, r"num_speculative_tokens=True \(bool\): allowed is a whole number"),
    "text k": ({"num_speculative_tokens": "3"}, r"num_speculative_tokens='3' \(str\): allowed is a whole number"),
    "backend": ({"backend": []}, r"backend=\[\]: allowed are auto, torch"),
    "cache dtype": ({"kv_cache_dtype": []}, r"kv_cache_dtype=\[\]: allowed are auto, fp8"),
    "graphs": ({"cuda_graphs": "no"}, "cuda_graphs='no': allowed are 'auto', True and False"),
    "concat": ({"mtp_concat": "no"}, "mtp_concat='no': allowed are auto, embedding_first, hidden_first"),
    "feedback": ({"mtp_feedback": []}, r"mtp_feedback=\[\]: allowed are post_norm, pre_norm"),
    "seed too large": ({"seed": 2**64}, "seed=18446744073709551616: allowed is -9223372036854775808 …"),
    "seed": ({"seed": 1.5}, r"seed=1.5 \(float\): allowed is a whole number"),
    "scales": ({"kv_cache_scales": 3, "kv_cache_dtype": "fp8"}, "kv_cache_scales=3: allowed is one pair"),
    "short scales": ({"kv_cache_scales": [(1.0,)] * 4, "kv_cache_dtype": "fp8"}, "allowed is one pair"),
    "text scales": ({"kv_cache_scales": [("a", 1.0)] * 4, "kv_cache_dtype": "fp8"}, "allowed is one pair"),
    "no scales": ({"kv_cache_scales": []}, "kv_cache_scales is empty"),
}


@pytest.mark.parametrize("name", SIZES)
def test_an_option_of_a_wrong_kind_or_size(name: str) -> None:
    """Absurd sizes are told in numbers before anything is allocated."""
    options, words = SIZES[name]
    model = tiny_llama()
    start = time.perf_counter()
    refused(InvalidInputError, words, model, draft=table_head(model), **{"num_speculative_tokens": 3, **options})
    assert time.perf_counter() - start < 5


TOKENIZERS: dict[str, tuple[Any, type[SpecdecError], str]] = {
    "a number": (3, InvalidInputError, "tokenizer=3 is no tokenizer: it lacks __call__ and decode"),
    "a class": (LetterTokenizer, InvalidInputError, "is no tokenizer: it is a class"),
    "no decode": (print, InvalidInputError, "is no tokenizer: it lacks decode"),
    "no folder": ("./nothing", ModelLoadError, "cannot load the tokenizer of './nothing': there is no folder"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_object_that_is_no_tokenizer(name: str) -> None:
    given, kind, words = TOKENIZERS[name]
    refused(kind, words, tiny_llama(), tokenizer=given)


def test_a_tokenizer_is_loaded_by_name_and_one_of_another_model_noticed() -> None:
    with pytest.warns(UserWarning, match="the tokenizer has .* tokens and the target 64: it may be another model's"):
        model = load(tiny_llama(), tokenizer="gsm-llama")
    assert model.tokenizer.decode(model.tokenizer("eggs")["input_ids"]).strip().endswith("eggs")


class Templated(LetterTokenizer):
    """Its template refuses a conversation that begins with the system."""

    chat_template = "yes"

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> dict[str, list[int]]:
        import jinja2

        if messages[0]["role"] == "system":
            raise jinja2.TemplateError("no system role")
        return self(messages[0]["content"] + messages[1 % len(messages)]["content"])


CHATS: dict[str, tuple[list[Any], str]] = {
    "the template refuses": ([{"role": "system", "content": "a"}], "the chat template refuses .*no system role"),
    "no role": ([{"content": "a"}], "chat message 1 has role=None"),
    "a number as role": ([{"role": 3, "content": "a"}], "chat message 1 has role=3"),
    "no content": ([{"role": "user"}], "chat message 1 .* has content=None"),
    "a number as content": ([{"role": "user", "content": 3}], "chat message 1 .* has content=3"),
    "a later one": ([{"role": "user", "content": "a"}, {"role": "user", "content": b"b"}], "chat message 2 .*b'b'"),
    "parts that it cannot read": ([{"role": "user", "content": [{"type": "thought"}]}], "the chat template refuses"),
    "an image": (
        [{"role": "user", "content": [{"type": "image", "url": "a"}]}],
        "chat message 1 .*'image'; only text",
    ),
    "an image's address": (
        [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        "chat message 2 has a part of type 'image_url'; only text is served",
    ),
    "a video without a type": (
        [{"role": "user", "content": [{"video": "a.mp4"}]}],
        "type 'video'; only text is served",
    ),
}


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.cases(1)
def test_messages_that_the_template_cannot_take(name: str) -> None:
    messages, words = CHATS[name]
    model = load(tiny_llama(), tokenizer=Templated())
    with pytest.raises(InvalidInputError, match=words):
        model.generate(messages)
    assert model.generate([1, 2, 3], SamplingParams(max_new_tokens=4))[0].token_ids == hf_greedy([1, 2, 3], 4)


@pytest.mark.parametrize("copying", [pickle.dumps, copy.deepcopy, copy.copy])
def test_a_model_cannot_be_copied(copying: Callable[[Any], Any]) -> None:
    model = load(tiny_llama())
    with pytest.raises(SpecdecError, match=r"cannot be copied or pickled.*from_pretrained where it is needed"):
        copying(model)
    assert model.generate([1, 2, 3], SamplingParams(max_new_tokens=4))[0].token_ids == hf_greedy([1, 2, 3], 4)


@pytest.mark.slow
def test_what_was_trusted_and_which_revision_is_recorded(saved: Path) -> None:
    facts = load(saved, trust_remote_code=True).describe()
    assert facts["trust_remote_code"] is True and facts["revision"] is None
    assert load(tiny_llama()).describe()["trust_remote_code"] is False


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_checkpoint_runs_only_when_it_is_trusted(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(saved, folder)
    settings(model_type="own", auto_map={"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnModel"})(
        folder
    )
    (folder / "code.py").write_text(CODE + f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    refused(ModelLoadError, "trust_remote_code=True", folder)
    assert not (tmp_path / "ran").exists()
    (completion,) = load(folder, trust_remote_code=True).generate([1, 2, 3], SamplingParams(max_new_tokens=4))
    assert (tmp_path / "ran").exists() and completion.token_ids == hf_greedy([1, 2, 3], 4)


@pytest.fixture
def silent() -> Iterator[str]:
    """A hub that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


LOAD = """
import sys, time
import drafters.checkpoints.tensor_files
from specdec import SpecdecError, SpeculativeModel
assert drafters.checkpoints.tensor_files.HUB_SECONDS <= 3
drafters.checkpoints.tensor_files.HUB_SECONDS = 0.5  # each of the loads waits so long for a silent hub
for names in sys.argv[1:]:
    target, _, draft = names.partition("+")
    start = time.perf_counter()
    try:
        model = SpeculativeModel.from_pretrained(target, draft or None, device="cpu")
        print("LOADED", model.generate([1, 2, 3])[0].token_ids[:4])
    except SpecdecError as error:
        print("REFUSED", error)
    print("SECONDS", time.perf_counter() - start, end=";")
"""


def in_a_process(endpoint: str, home: Path, *loads: str) -> list[tuple[str, float]]:
    """What a process that may ask the hub says of each load, TARGET or TARGET+DRAFT, and how long it took."""
    environment = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "*", "PYTHONPATH": sys.path[0]}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run([sys.executable, "-c", LOAD, *loads], env=environment, capture_output=True, timeout=240)
    said = done.stdout.decode().split(";")[:-1]
    assert len(said) == len(loads), done.stderr.decode()[-2000:]
    return [(one.split("SECONDS")[0], float(one.split("SECONDS")[1])) for one in said]


def cached(home: Path, name: str, saved: Path) -> None:
    """Put a model into the hub's cache, in its layout."""
    from transformers import AutoTokenizer

    model = home / "hub" / f"models--{name.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(saved, model / "snapshots" / commit)
    AutoTokenizer.from_pretrained(Path(__import__("specdec").__file__).parent / "models" / "gsm-llama").save_pretrained(
        model / "snapshots" / commit
    )
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)


@pytest.mark.slow
@pytest.mark.parametrize("network", [pytest.param("refused", marks=pytest.mark.long), "silent"])
@pytest.mark.thorough
def test_a_hub_that_does_not_answer_costs_seconds(network: str, silent: str, saved: Path, tmp_path: Path) -> None:
    """And a model in the hub's cache needs none."""
    endpoint = silent if network == "silent" else "http://127.0.0.1:9"
    cached(tmp_path, "some/model", saved)
    loaded, *refused = in_a_process(endpoint, tmp_path, "some/model", "nobody/nothing", "some/model+nobody/head")
    assert f"LOADED {hf_greedy([1, 2, 3], 4)}" in loaded[0], loaded
    assert loaded[1] < 60  # on a busy machine; asking a silent hub for every file takes minutes
    for (said, seconds), name in zip(refused, ("nobody/nothing", "nobody/head"), strict=True):
        assert "REFUSED" in said and "it does not answer" in said and name in said
        assert seconds < 12


def test_no_warning_of_ours_where_nothing_is_wrong(saved: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        load(saved)
