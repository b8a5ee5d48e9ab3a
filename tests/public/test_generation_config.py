"""The model's own generation_config: what of it applies, what is refused by name, and how it is switched off."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import LETTERS, VOCAB, hf_greedy, random_prompts, table_head, tiny_llama, wrap
from transformers import GenerationConfig

from specdec import SamplingParams, SpeculativeModel
from specdec.errors import InvalidInputError
from specdec.extensions.batches.records import answered
from specdec.extensions.batches.tasks import Task
from specdec.requests.submission import filled

PROMPT = random_prompts([9])[0]
NEW = 12
UNSAID = min(set(range(VOCAB)) - set(hf_greedy(PROMPT, NEW)))
"""A token that is not in the answer."""

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
}
"""Options that change the greedy answer: served as transformers serves them, whoever sets them."""
REFUSED_OWN: dict[str, Any] = {
    "guidance_scale": 2.0,
    "watermarking_config": {"bias": 2.0},
    "num_beams": 3,
    "penalty_alpha": 0.5,
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

SERVED: dict[str, Any] = {
    "max_new_tokens": NEW,
    "max_length": 9 + NEW,
    "eos_token_id": UNSAID,
    "num_return_sequences": 1,
    "stop_strings": ["zzzz"],
    "max_time": 1000.0,
    "do_sample": False,
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.1,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "typical_p": 0.5,
    "top_h": 0.5,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
}
"""In a caller's config: what is done as transformers does it; without sampling these values leave the greedy tokens."""
NO_EFFECT: dict[str, Any] = {
    "bos_token_id": 5,
    "pad_token_id": 5,
    "decoder_start_token_id": 5,
    "transformers_version": "5.0.0",
    "use_cache": False,
    "cache_implementation": "static",
    "cache_config": {"nbits": 4},
    "max_cache_len": 50,
    "prefill_chunk_size": 2,
    "low_memory": True,
    "disable_compile": True,
    "compile_config": {"dynamic": True},
    "continuous_batching_config": {"block_size": 2},
    "length_penalty": 2.0,
    "early_stopping": True,
    "diversity_penalty": 0.5,
}
CALLS_ONLY: dict[str, Any] = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "prompt_lookup_num_tokens": 3,
    "use_mtp": True,
    "speculation_type": "dflash",
    "max_matching_ngram_size": 3,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.0,
    "assistant_early_exit": 2,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
}
"""Refused in a caller's config; a model's own may have it."""
REFUSED: dict[str, Any] = {
    **{name: value for name, value in REFUSED_OWN.items() if name not in SERVED},
    "num_beam_groups": 2,
    "constraints": [1],
    "force_words_ids": [[3]],
    "dola_layers": "high",
    "is_assistant": True,
    "assistant_ensemble_weight": 0.5,
}
OLDEST = frozenset(
    word
    for line in (
        "assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind",
        "bad_words_ids begin_suppress_tokens bos_token_id cache_config cache_implementation compile_config",
        "constraints continuous_batching_config decoder_start_token_id disable_compile diversity_penalty do_sample",
        "dola_layers early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id",
        "epsilon_cutoff eta_cutoff exponential_decay_length_penalty force_words_ids forced_bos_token_id",
        "forced_eos_token_id guidance_scale is_assistant length_penalty low_memory max_cache_len max_length",
        "max_matching_ngram_size max_new_tokens max_time min_length min_new_tokens min_p no_repeat_ngram_size",
        "num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences",
        "output_attentions output_hidden_states output_logits output_scores pad_token_id penalty_alpha",
        "prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values renormalize_logits repetition_penalty",
        "return_dict_in_generate sequence_bias speculation_type stop_strings suppress_tokens target_lookbehind",
        "temperature token_healing top_h top_k top_p transformers_version typical_p use_cache use_mtp",
        "watermarking_config",
    )
    for word in line.split()
)
"""Fields of the GenerationConfig of transformers 5.17.0, the oldest release that is supported."""


def loaded(num_drafts: int = 3, use: str | None = None, **fields: Any) -> Any:
    """A model with these fields in its own generation config."""
    model = tiny_llama()
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    options = {} if use is None else {"generation_config": use}
    head = table_head(model) if num_drafts else None
    return wrap(model, head, num_speculative_tokens=num_drafts, **options)


def greedy(wrapped: Any, prompt: list[int] = PROMPT, **params: Any) -> list[int]:
    tokens: list[int] = wrapped.generate(prompt, **{"max_new_tokens": NEW, "temperature": 0, **params})[0].token_ids
    return tokens


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("field", ["guidance_scale", "num_beams"])
def test_what_changes_the_arg_max_and_is_not_served_is_refused_by_name(field: str, num_drafts: int) -> None:
    wrapped = loaded(num_drafts, **{field: REFUSED_OWN[field]})
    rounds = wrapped.engine_stats.rounds
    for params in (None, [None, SamplingParams()][:1], GenerationConfig(max_new_tokens=4)):
        with pytest.raises(InvalidInputError) as caught:
            wrapped.stream(PROMPT, params)
        message = str(caught.value)
        assert f"{field}={REFUSED_OWN[field]!r}" in message and 'generation_config="ignore"' in message
    assert wrapped.engine_stats.rounds == rounds
    plain = wrapped.generate(PROMPT, SamplingParams(NEW))[0].token_ids
    assert plain == hf_greedy(PROMPT, NEW), "to SamplingParams nothing is added"


def generated(model: Any, **options: Any) -> list[int]:
    """Greedy tokens of transformers' own generate, with the model's generation config as it is."""
    ids = torch.tensor([PROMPT])
    said = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, **options)
    return list(said[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize("num_drafts", [pytest.param(0, marks=pytest.mark.long), 3])
@pytest.mark.thorough
def test_options_of_the_models_own_config_apply(num_drafts: int) -> None:
    """To calls by name and to a GenerationConfig, never to SamplingParams; they are those of the moment."""
    wrapped = loaded(num_drafts, eos_token_id=UNSAID)
    config, plain, changed = wrapped.hf_model.generation_config, hf_greedy(PROMPT, NEW), 0
    for field, value in ALTERING.items():
        setattr(config, field, value)
        right = generated(wrapped.hf_model)
        changed += right != plain
        assert greedy(wrapped) == right, field
        assert wrapped.generate(PROMPT, SamplingParams(NEW))[0].token_ids == plain, field
        if field == "repetition_penalty":
            assert wrapped.generate(PROMPT, SamplingParams(NEW), seed=1)[0].token_ids == plain, "a name beside it"
        assert wrapped.generate(PROMPT, GenerationConfig(max_new_tokens=NEW))[0].token_ids == right, field
        setattr(config, field, None)
    assert changed >= 5 and greedy(wrapped) == plain


def test_a_request_may_switch_an_option_of_the_models_own_config_off() -> None:
    wrapped = loaded(repetition_penalty=1.7)
    assert greedy(wrapped) == generated(wrapped.hf_model) != hf_greedy(PROMPT, NEW)
    assert greedy(wrapped, repetition_penalty=1.0) == hf_greedy(PROMPT, NEW)
    assert greedy(wrapped, repetition_penalty=None) == generated(wrapped.hf_model), "None is unset"
    assert wrapped.describe()["generation_config"] == "model (applied: repetition_penalty=1.7)"


SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "typical_p": 0.8}


@pytest.mark.parametrize("use", ["model", "ignore"])
@pytest.mark.cases(1)
def test_a_call_by_name_starts_from_how_the_file_samples(use: str) -> None:
    """As in transformers: do_sample, temperature and filters, and top_k=50 where it samples and does not say."""
    wrapped = loaded(3, use, **SAMPLED, max_new_tokens=NEW, repetition_penalty=1.2, stop_strings=["zzzz"])
    own = SamplingParams(NEW, 0.6, 50, 0.9, typical_p=0.8, repetition_penalty=1.2, stop="zzzz", seed=5)
    own = own if use == "model" else SamplingParams(seed=5, max_new_tokens=NEW)
    length = {} if use == "model" else {"max_new_tokens": NEW}

    def tokens(*params: Any, **options: Any) -> list[int]:
        return list(wrapped.generate(PROMPT, *params, **options)[0].token_ids)

    right = tokens(own)
    assert tokens(seed=5, **length) == right and len(right) == NEW
    assert tokens(top_k=3, seed=5, **length) == tokens(replace(own, top_k=3))
    assert tokens(temperature=0, **length) == tokens(replace(own, temperature=0.0))
    config = GenerationConfig(max_new_tokens=NEW)
    assert tokens(config, seed=5) == right
    (_, named), *_ = wrapped.generate_iter(iter([PROMPT]), seed=5, **length)
    pairs = dict(wrapped.generate_iter(iter([(PROMPT, None), (PROMPT, SamplingParams(NEW))]), seed=5, **length))
    assert named.token_ids == pairs[0].token_ids == right and pairs[1].token_ids == hf_greedy(PROMPT, NEW)


def test_samples_of_the_file_are_those_of_a_call_by_name() -> None:
    wrapped = loaded(do_sample=True, num_return_sequences=3)
    assert len(wrapped.generate(PROMPT, max_new_tokens=2)) == 3
    assert len(wrapped.generate(PROMPT, max_new_tokens=2, n=1, temperature=0)) == 1
    assert len(wrapped.generate(PROMPT, SamplingParams(2))) == 1


def test_the_command_line_and_batches_have_defaults_of_their_own_and_the_rest_of_the_file() -> None:
    wrapped = loaded(**SAMPLED, repetition_penalty=1.2)
    params = filled(SamplingParams(9), wrapped)
    assert (params.temperature, params.top_k, params.repetition_penalty) == (0.0, 0, 1.2)
    assert filled(SamplingParams(9), loaded(3, "ignore", repetition_penalty=1.2)) == SamplingParams(9)
    (answer,) = answered(wrapped, [Task(1, prompt=PROMPT, params=SamplingParams(NEW))])
    assert answer.completions[0].token_ids == generated(wrapped.hf_model)


def test_every_field_that_generate_would_apply_and_that_is_not_served_is_refused() -> None:
    wrapped = loaded()
    config = wrapped.hf_model.generation_config
    for field, value in REFUSED_OWN.items():
        setattr(config, field, value)
        with pytest.raises(InvalidInputError, match=f"{field}="):
            wrapped.generate(PROMPT)
        setattr(config, field, None)
    assert greedy(wrapped) == hf_greedy(PROMPT, NEW)


def test_what_does_not_change_greedy_tokens_is_not_refused() -> None:
    assert greedy(loaded(**HARMLESS)) == hf_greedy(PROMPT, NEW)


def with_field(name: str, value: Any) -> GenerationConfig:
    config = GenerationConfig(max_new_tokens=None if name == "max_length" else NEW)
    setattr(config, name, value)  # as read from a file: transformers checks some of them when a config is made
    return config


def test_every_field_is_served_or_refused_or_named_as_without_effect() -> None:
    kinds = [SERVED, ALTERING, NO_EFFECT, CALLS_ONLY, REFUSED]
    known = [name for kind in kinds for name in kind]
    installed = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert len(known) == len(set(known)), "each is of one kind"
    assert installed | OLDEST <= set(known)
    said = (Path(__file__).parents[2] / "docs" / "generation_options.md").read_text()
    assert [name for name in {**NO_EFFECT, **CALLS_ONLY} if f"`{name}`" not in said] == []
    wrapped = loaded(eos_token_id=UNSAID)
    right = hf_greedy(PROMPT, NEW)
    for name, value in {**SERVED, **NO_EFFECT}.items():
        assert wrapped.generate(PROMPT, with_field(name, value))[0].token_ids == right, name
    for name, value in ALTERING.items():
        right = generated(wrapped.hf_model, **{name: value})
        assert wrapped.generate(PROMPT, with_field(name, value))[0].token_ids == right, name
    for name, value in {**CALLS_ONLY, **REFUSED}.items():
        with pytest.raises(InvalidInputError, match=f"not supported in GenerationConfig: .*{name}="):
            wrapped.generate(PROMPT, with_field(name, value))


def test_a_models_own_config_may_have_what_a_caller_may_not_ask_for() -> None:
    wrapped = loaded(**CALLS_ONLY, **NO_EFFECT)
    assert greedy(wrapped) == hf_greedy(PROMPT, NEW)
    assert wrapped.generate(PROMPT, GenerationConfig(max_new_tokens=NEW))[0].token_ids == hf_greedy(PROMPT, NEW)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.cases(1)
def test_ignore_switches_everything_off_and_says_so(num_drafts: int) -> None:
    model = tiny_llama()
    model.generation_config.repetition_penalty = 1.7
    ids = torch.tensor([PROMPT])
    own = model.generate(ids, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids))
    assert own[0, len(PROMPT) :].tolist() != hf_greedy(PROMPT, NEW), "the penalty would have changed the answer"
    wrapped = loaded(num_drafts, "ignore", repetition_penalty=1.7, suppress_tokens=[4])
    assert greedy(wrapped) == hf_greedy(PROMPT, NEW)
    facts = wrapped.describe()["generation_config"]
    assert "ignore" in facts and "repetition_penalty=1.7" in facts and "suppress_tokens=(4,)" in facts
    assert loaded().describe()["generation_config"] == "model"


def test_ignore_holds_for_a_passed_config_but_not_for_what_it_asks_itself() -> None:
    wrapped = loaded(3, "ignore", repetition_penalty=1.7, do_sample=True, max_new_tokens=3, eos_token_id=VOCAB - 1)
    config = GenerationConfig(max_new_tokens=NEW)
    right = hf_greedy(PROMPT, NEW)
    end = right.index(VOCAB - 1) + 1 if VOCAB - 1 in right else NEW
    assert wrapped.generate(PROMPT, config)[0].token_ids == right[:end]
    asked = GenerationConfig(max_new_tokens=NEW, repetition_penalty=1.2)
    own = generated(tiny_llama(), repetition_penalty=1.2)
    end = own.index(VOCAB - 1) + 1 if VOCAB - 1 in own else NEW
    assert wrapped.generate(PROMPT, asked)[0].token_ids == own[:end]


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
    assert SamplingParams.from_model(loaded(do_sample=True, typical_p=0.4)).typical_p == 0.4
    with pytest.raises(InvalidInputError, match="SpeculativeModel or a transformers model"):
        SamplingParams.from_model("gsm-llama")
    with pytest.raises(InvalidInputError, match="unknown sampling option 'temprature'"):
        SamplingParams.from_model(wrapped, temprature=1.0)


def test_stop_strings_of_the_file_may_be_taken_over() -> None:
    text = "".join(LETTERS[t] for t in hf_greedy(PROMPT, NEW))
    (done,) = loaded(stop_strings=[text[4:7]]).generate(PROMPT, max_new_tokens=NEW)
    assert (done.finish_reason, done.text) == ("stop", text[: text.index(text[4:7])])
    wrapped = loaded(stop_strings=["zzzz"])
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
@pytest.mark.thorough
def test_the_command_line_has_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(SpeculativeModel.from_pretrained("gsm-llama").hf_model.name_or_path, folder)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**config, "guidance_scale": 1.5}))
    command = ["generate", "Tom has 3 boxes.", "--model", str(folder), "--draft", "none", "--max-new-tokens", "4"]
    code, printed = command_line(monkeypatch, capsys, *command)
    assert code and "guidance_scale=1.5" in printed
    code, printed = command_line(monkeypatch, capsys, *command, "--generation-config", "ignore")
    assert not code, printed
    facts = ["inspect", "--model", str(folder), "--draft", "none", "--generation-config", "ignore"]
    code, printed = command_line(monkeypatch, capsys, *facts)
    assert not code and "ignore (switched off: guidance_scale=1.5)" in printed
