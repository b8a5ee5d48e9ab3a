"""The built-in target: found by name, loads, has the promised shape, talks in the promised format."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import specdec
from evals.data.arithmetic import Problem, problems
from specdec.errors import HeadLoadError, InvalidInputError, ModelLoadError
from specdec.loading.heads import IN_TARGET, LOOKUP, resolve_head
from specdec.loading.names import (
    BUILTIN_HEADS,
    DRAFT_WORDS,
    GSM_LLAMA,
    builtin_names,
    builtin_path,
    head_for,
    misspelt,
    misspelt_draft,
)
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import pool_requests

FOLDER = builtin_path(GSM_LLAMA)
MIB = 2**20
USER = {"role": "user", "content": "How many?"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_names_are_known_without_importing_torch() -> None:
    code = "import sys, specdec.loading.names as m; print(m.builtin_names()); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert GSM_LLAMA in done.stdout


def test_unknown_name_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(InvalidInputError, match=rf"'gsm-lama'.*{GSM_LLAMA}"):
        builtin_path("gsm-lama")
    with pytest.raises(InvalidInputError):
        builtin_path("")


@pytest.mark.parametrize("name", ["gsm-lama", "gsm-lama-eagle3", "gsm_deepseek"])
def test_a_misspelt_name_is_refused_with_the_right_one(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before the hub is asked; a folder of such a name is a folder."""
    right = name.replace("lama", "llama").replace("_", "-")
    known = ", ".join(builtin_names())
    message = rf"cannot load the .*{name}.*did you mean '{right}'\? Built in are {known};"
    with pytest.raises(ModelLoadError, match=message):
        specdec.SpeculativeModel.from_pretrained(name)
    with pytest.raises(HeadLoadError, match=message):
        resolve_head(name, "gsm-llama")
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    assert resolve_head(name, "gsm-llama") == name
    assert misspelt("gpt2") == misspelt("someone/gsm-lama") == misspelt("gsm-llama") == ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("atuo", "did you mean 'auto', the built-in head"),
        ("mpt", "did you mean 'mtp', the module in"),
        ("Lookup", "did you mean 'lookup', drafts without a head"),
        ("blok", "did you mean 'block', the built-in head that drafts"),
        ("none", "without a head draft is None"),
    ],
)
def test_a_misspelt_word_of_draft_is_refused_with_the_right_one(name: str, words: str) -> None:
    assert set(IN_TARGET) | {*BUILTIN_HEADS, LOOKUP} == set(DRAFT_WORDS)
    with pytest.raises(HeadLoadError, match=words):
        resolve_head(name, "gsm-llama")
    assert misspelt_draft("someone/mpt") == misspelt_draft("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B") == ""


@pytest.mark.parametrize(
    ("target", "head"),
    [
        ("gsm-llama", "gsm-llama-eagle3"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-eagle3"),
        ("someone/SmolLM2-135M-Instruct-GGUF", "smollm2-135m-eagle3"),
        ("folder/smollm2-135m-instruct", "smollm2-135m-eagle3"),
        ("HuggingFaceTB/SmolLM2-135M", None),
        ("HuggingFaceTB/SmolLM2-360M-Instruct", None),
        ("gsm-llama-eagle3", None),
        (None, None),
    ],
)
def test_the_head_that_auto_means_for_a_name(target: str | None, head: str | None) -> None:
    assert head_for(target) == head


def test_the_head_that_block_means() -> None:
    assert resolve_head("block", "gsm-llama") == str(builtin_path("gsm-llama-block"))
    assert resolve_head("block", str(builtin_path("gsm-llama"))) == str(builtin_path("gsm-llama-block"))
    for target in ("gsm-deepseek", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        with pytest.raises(HeadLoadError, match="has no built-in head that drafts a whole block in one pass; give"):
            resolve_head("block", target)


@pytest.mark.slow
def test_the_built_in_block_head_drafts_what_the_target_accepts() -> None:
    """Four generated problems; tau on GSM8K is 4.0. With the target's states hidden from it the head has 1.2."""
    prompts: list[Any] = [[USER | {"content": own.question}] for own in problems("heldout", 4)]
    params = SamplingParams(max_new_tokens=64)
    sizes: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "kv_cache_tokens": 2048, "max_model_len": 512}
    with SpeculativeModel.from_pretrained("gsm-llama", "block", **sizes) as model:
        assert model.num_speculative_tokens == 7
        drafted = model.generate(prompts, params)
        plain = model.generate(prompts, SamplingParams(max_new_tokens=64, num_speculative_tokens=0))
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert pool_requests([c.stats for c in drafted]).tau > 3


def test_the_head_that_auto_means_for_a_gguf_file(tmp_path: Path) -> None:
    """By the file's name, given whole, by its folder, or beside that; never by the folder's name."""
    file = tmp_path / "SmolLM2-135M-Instruct.Q8_0.gguf"
    file.write_bytes(b"")
    for target, name in ((file, None), (tmp_path, None), (tmp_path, file.name)):
        assert head_for(target, name) == "smollm2-135m-eagle3"
        assert resolve_head("auto", str(target), name) == str(builtin_path("smollm2-135m-eagle3"))
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    other = tmp_path / "SmolLM2-135M-Instruct" / "other.gguf"
    other.write_bytes(b"")
    assert head_for(other) is None


@pytest.mark.parametrize("name", builtin_names())
def test_every_builtin_has_a_card_and_stays_small(name: str) -> None:
    files = [file for file in builtin_path(name).iterdir() if file.is_file()]
    assert "README.md" in {file.name for file in files}
    assert max(file.stat().st_size for file in files) <= 15 * MIB


def test_target_and_heads_fit_in_22_megabytes() -> None:
    folders = [builtin_path(name) for name in builtin_names() if name.startswith(GSM_LLAMA)]
    assert sum(file.stat().st_size for folder in folders for file in folder.iterdir()) <= 22 * 10**6


def test_config_is_a_plain_llama_with_one_end_token(tokenizer: PreTrainedTokenizerFast) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    generation = GenerationConfig.from_pretrained(FOLDER)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["head_dim"], config["vocab_size"], config["max_position_embeddings"]) == (64, 2048, 2048)
    assert config["tie_word_embeddings"] and config["bos_token_id"] is None
    assert len(tokenizer) == config["vocab_size"]
    assert generation.eos_token_id == [tokenizer.eos_token_id] == [config["eos_token_id"]]
    assert tokenizer.decode([tokenizer.eos_token_id]) == "<|end|>"


@pytest.mark.parametrize("text", ["Tom has 1234 apples.\n#### 7", "50% = $0.5", "naïve – 漢字 🙂", "  2  spaces\t", ""])
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_its_own_token(tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = tokenizer.get_vocab()
    assert [token for token in vocabulary if re.search(r"\d", token) and len(token) > 1] == []
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1024")] == list("1024")


def test_chat_template_marks_turns_and_adds_no_bos(tokenizer: PreTrainedTokenizerFast) -> None:
    answer = {"role": "assistant", "content": "#### 2"}
    two_turns = tokenizer.apply_chat_template([USER, answer, USER], tokenize=False, add_generation_prompt=True)
    one = "<|user|>How many?<|end|>"
    assert two_turns == f"{one}<|assistant|>#### 2<|end|>{one}<|assistant|>"
    ids = tokenizer.apply_chat_template([USER], add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == one + "<|assistant|>"


def test_chat_template_puts_a_system_message_before_the_first_question(tokenizer: PreTrainedTokenizerFast) -> None:
    text = tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}, USER], tokenize=False)
    assert text == "<|user|>Be brief.\n\nHow many?<|end|>"


def test_chat_template_refuses_unknown_roles(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(Exception, match="not tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


@pytest.mark.slow
def test_the_target_answers_heldout_problems_right(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """20 of the held-out problems; the card has the number for 1,000."""
    found = problems("heldout", 20, seed=11)
    answers = greedy(model, tokenizer, found)
    right = [ended(answer, problem) for answer, problem in zip(answers, found, strict=True)]
    assert sum(right) >= 17, sum(right)


def ended(answer: str, problem: Problem) -> bool:
    """Whether the answer ends with the right last line and the end of the turn."""
    return re.search(rf"\n#### {problem.result}<\|end\|>(<\|pad\|>)*$", answer) is not None


def greedy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, found: list[Problem]) -> list[str]:
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}], add_generation_prompt=True, tokenize=False
        )
        for problem in found
    ]
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=200, do_sample=False)
    return tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :])


def test_builtin_path_is_the_installed_folder() -> None:
    assert Path(str(specdec.__file__)).parent / "models" / GSM_LLAMA == FOLDER
