"""The model's own generation_config: what of it applies, what is refused by name, and how it is switched off."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import VOCAB, hf_greedy, random_prompts, table_head, tiny_llama, wrap
from transformers import GenerationConfig

from specdec import SamplingParams, SpeculativeModel
from specdec.errors import InvalidInputError

PROMPT = random_prompts([9])[0]
NEW = 12

ALTERING: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.3,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[3]],
    "suppress_tokens": [4, 5],
    "begin_suppress_tokens": [4],
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 0,
    "sequence_bias": [[[3], 2.0]],
    "min_new_tokens": 4,
    "min_length": 30,
    "exponential_decay_length_penalty": (2, 1.5),
    "guidance_scale": 2.0,
    "watermarking_config": {"bias": 2.0},
    "num_beams": 3,
    "penalty_alpha": 0.5,
    "max_time": 1.0,
    "stop_strings": ["a"],
    "token_healing": True,
}
HARMLESS: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.3,
    "top_k": 3,
    "top_p": 0.5,
    "typical_p": 0.5,
    "repetition_penalty": 1.0,
    "min_length": 0,
    "num_beams": 1,
    "suppress_tokens": [],
    "guidance_scale": 1.0,
    "use_cache": False,
    "renormalize_logits": True,
    "prompt_lookup_num_tokens": 3,
    "pad_token_id": 0,
    "chat_format": "chatml",
    "max_length": 7,
}


def loaded(num_drafts: int = 3, use: str | None = None, **fields: Any) -> Any:
    """A model with these fields in its own generation config."""
    model = tiny_llama()
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    options = {} if use is None else {"generation_config": use}
    head = table_head(model) if num_drafts else None
    return wrap(model, head, num_speculative_tokens=num_drafts, **options)


def greedy(wrapped: Any, prompt: list[int] = PROMPT, **params: Any) -> list[int]:
    tokens: list[int] = wrapped.generate(prompt, SamplingParams(max_new_tokens=NEW, **params))[0].token_ids
    return tokens


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("field", ["repetition_penalty", "suppress_tokens"])
def test_what_changes_the_arg_max_is_refused_by_name(field: str, num_drafts: int) -> None:
    wrapped = loaded(num_drafts, **{field: ALTERING[field]})
    rounds = wrapped.engine_stats.rounds
    for params in (SamplingParams(), SamplingParams(temperature=1.0), None, GenerationConfig(max_new_tokens=4)):
        with pytest.raises(InvalidInputError) as caught:
            wrapped.stream(PROMPT, params)
        message = str(caught.value)
        assert f"{field}={ALTERING[field]!r}" in message and 'generation_config="ignore"' in message
    assert wrapped.engine_stats.rounds == rounds


def test_every_field_that_generate_would_apply_is_refused() -> None:
    wrapped = loaded()
    config = wrapped.hf_model.generation_config
    for field, value in ALTERING.items():
        setattr(config, field, value)
        with pytest.raises(InvalidInputError, match=f"{field}="):
            wrapped.generate(PROMPT)
        setattr(config, field, None)
    assert greedy(wrapped) == hf_greedy(PROMPT, NEW)


def test_what_does_not_change_greedy_tokens_is_not_refused() -> None:
    assert greedy(loaded(**HARMLESS)) == hf_greedy(PROMPT, NEW)


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_ignore_switches_everything_off_and_says_so(num_drafts: int) -> None:
    model = tiny_llama()
    model.generation_config.repetition_penalty = 1.7
    ids = torch.tensor([PROMPT])
    own = model.generate(ids, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids))
    assert own[0, len(PROMPT) :].tolist() != hf_greedy(PROMPT, NEW), "the penalty would have changed the answer"
    wrapped = loaded(num_drafts, "ignore", repetition_penalty=1.7, suppress_tokens=[4])
    assert greedy(wrapped) == hf_greedy(PROMPT, NEW)
    facts = wrapped.describe()["generation_config"]
    assert "ignore" in facts and "repetition_penalty=1.7" in facts and "suppress_tokens=[4]" in facts
    assert loaded().describe()["generation_config"] == "model"


def test_ignore_holds_for_a_passed_config_but_not_for_what_it_asks_itself() -> None:
    wrapped = loaded(3, "ignore", repetition_penalty=1.7, do_sample=True, max_new_tokens=3, eos_token_id=VOCAB - 1)
    config = GenerationConfig(max_new_tokens=NEW)
    right = hf_greedy(PROMPT, NEW)
    end = right.index(VOCAB - 1) + 1 if VOCAB - 1 in right else NEW
    assert wrapped.generate(PROMPT, config)[0].token_ids == right[:end]
    with pytest.raises(InvalidInputError, match=r"repetition_penalty=1\.2"):
        wrapped.generate(PROMPT, GenerationConfig(repetition_penalty=1.2))


@pytest.mark.parametrize("use", ["none", None, True, 3, "", GenerationConfig()])
def test_any_other_value_is_refused(use: Any) -> None:
    with pytest.raises(InvalidInputError, match=r'generation_config=.*"model".*"ignore"'):
        wrap(tiny_llama(), generation_config=use)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("use", ["model", "ignore"])
def test_eos_ids_are_those_of_the_moment(num_drafts: int, use: str) -> None:
    """Set, changed and taken away after the model was wrapped; a request keeps those it was submitted with."""
    prompt = next(p for p in random_prompts(range(5, 25)) if len(set(hf_greedy(p, NEW))) > 2)
    right = hf_greedy(prompt, NEW)
    wrapped = loaded(num_drafts, use)
    config = wrapped.hf_model.generation_config
    _, one, other, *_ = (i for i, t in enumerate(right) if t not in right[:i])
    config.eos_token_id = right[one]
    stream = wrapped.stream(prompt, SamplingParams(max_new_tokens=NEW))
    config.eos_token_id = [right[other], VOCAB + 5]
    assert greedy(wrapped, prompt) == right[: other + 1]
    *_, last = stream
    assert (last.completion.token_ids, last.completion.finish_reason) == (right[: one + 1], "eos")
    assert greedy(wrapped, prompt, ignore_eos=True) == right
    config.eos_token_id = None
    wrapped.hf_model.config.eos_token_id = right[one]  # generate does not read it there, and neither do we
    assert greedy(wrapped, prompt) == right


def test_from_model_reads_how_the_file_samples() -> None:
    wrapped = loaded(do_sample=True, temperature=0.6, top_p=0.9, min_p=0.05)
    right = SamplingParams(temperature=0.6, top_k=50, top_p=0.9, min_p=0.05)
    assert SamplingParams.from_model(wrapped) == SamplingParams.from_model(wrapped.hf_model) == right
    assert SamplingParams.from_model(wrapped, max_new_tokens=7, seed=1, top_k=5) == SamplingParams(
        max_new_tokens=7, temperature=0.6, top_k=5, top_p=0.9, min_p=0.05, seed=1
    )
    assert SamplingParams.from_model(loaded(temperature=0.6, top_p=0.9)) == SamplingParams(), "without do_sample"
    assert wrapped.generate(PROMPT, SamplingParams.from_model(wrapped, max_new_tokens=3, seed=1))[0].token_ids
    with pytest.raises(InvalidInputError, match=r"typical_p=0\.4"):
        SamplingParams.from_model(loaded(do_sample=True, typical_p=0.4))
    with pytest.raises(InvalidInputError, match="SpeculativeModel or a transformers model"):
        SamplingParams.from_model("gsm-llama")
    with pytest.raises(InvalidInputError, match="unknown sampling option temprature"):
        SamplingParams.from_model(wrapped, temprature=1.0)


def test_stop_strings_of_the_file_may_be_taken_over() -> None:
    wrapped = loaded(stop_strings=["zzzz"])
    assert greedy(wrapped, stop="zzzz") == hf_greedy(PROMPT, NEW)
    assert SamplingParams.from_model(wrapped).stop == ("zzzz",)


def command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[Any, str]:
    """Run the `specdec` script in this process; its exit status and what it printed."""
    with (Path(__file__).parents[2] / "pyproject.toml").open("rb") as file:
        module, _, name = tomllib.load(file)["project"]["scripts"]["specdec"].partition(":")
    monkeypatch.setattr(sys, "argv", ["specdec", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        getattr(import_module(module), name)()
    printed = capsys.readouterr()
    return caught.value.code, printed.out + printed.err


@pytest.mark.slow
def test_the_command_line_has_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(SpeculativeModel.from_pretrained("gsm-llama").hf_model.name_or_path, folder)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**config, "repetition_penalty": 1.5}))
    command = ["generate", "Tom has 3 boxes.", "--model", str(folder), "--draft", "none", "--max-new-tokens", "4"]
    code, printed = command_line(monkeypatch, capsys, *command)
    assert code and "repetition_penalty=1.5" in printed
    code, printed = command_line(monkeypatch, capsys, *command, "--generation-config", "ignore")
    assert not code, printed
    facts = ["inspect", "--model", str(folder), "--draft", "none", "--generation-config", "ignore"]
    code, printed = command_line(monkeypatch, capsys, *facts)
    assert not code and "ignore (switched off: repetition_penalty=1.5)" in printed
