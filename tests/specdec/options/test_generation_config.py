"""A transformers.GenerationConfig means what it means to transformers' own generate, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import EOS, LETTERS, hf_greedy, random_prompts, table_head, tiny_llama, wrap
from transformers import GenerationConfig

from specdec.errors import InvalidInputError
from specdec.options.generation_config import merged, refused_fields
from specdec.requests.sampling import SamplingParams
from specdec.requests.submission import from_generation_config

PROMPT = random_prompts([9])[0]


def read(model: Any = None, **options: Any) -> SamplingParams:
    return from_generation_config(GenerationConfig(**options), model or tiny_llama(), len(PROMPT))


def test_the_defaults_are_greedy_and_twenty_new_tokens() -> None:
    assert read() == SamplingParams(max_new_tokens=20)


def test_sampling_takes_transformers_defaults() -> None:
    assert read(do_sample=True) == SamplingParams(max_new_tokens=20, temperature=1.0, top_k=50)


@pytest.mark.parametrize(
    ("options", "right"),
    [
        ({"max_new_tokens": 7}, {"max_new_tokens": 7}),
        ({"max_length": 30}, {"max_new_tokens": 21}),
        ({"max_length": 30, "max_new_tokens": 5}, {"max_new_tokens": 5}),
        ({"temperature": 0.5}, {}),
        ({"do_sample": True, "temperature": 0.5, "top_k": 0}, {"temperature": 0.5, "top_k": 0}),
        ({"do_sample": True, "top_k": 7, "top_p": 0.8, "min_p": 0.1}, {"top_k": 7, "top_p": 0.8, "min_p": 0.1}),
        ({"eos_token_id": 5}, {"stop_token_ids": (5,), "ignore_eos": True}),
        ({"eos_token_id": [5, 6]}, {"stop_token_ids": (5, 6), "ignore_eos": True}),
        ({"stop_strings": "ab"}, {"stop": ("ab",)}),
        ({"stop_strings": ["ab", "c"]}, {"stop": ("ab", "c")}),
        ({"num_beams": 1, "use_cache": False}, {}),
        ({"repetition_penalty": 1.3, "min_new_tokens": 4}, {"repetition_penalty": 1.3, "min_new_tokens": 4}),
        ({"bad_words_ids": [[3], [4, 5]]}, {"bad_words_ids": ((3,), (4, 5))}),
        ({"sequence_bias": [[[3, 4], 2.0]]}, {"sequence_bias": {(3, 4): 2.0}}),
        ({"forced_eos_token_id": 4, "suppress_tokens": [5]}, {"forced_eos_token_id": (4,), "suppress_tokens": (5,)}),
        ({"typical_p": 0.5, "do_sample": True}, {"typical_p": 0.5}),
    ],
)
def test_what_is_honoured(options: dict[str, Any], right: dict[str, Any]) -> None:
    base = {"temperature": 1.0, "top_k": 50} if options.get("do_sample") else {}
    assert read(**options) == SamplingParams(**{"max_new_tokens": 20, **base, **right})


def test_unset_fields_come_from_the_models_own_config() -> None:
    model = tiny_llama()
    model.generation_config = GenerationConfig(do_sample=True, top_p=0.7, top_k=0, eos_token_id=EOS, max_length=40)
    right = SamplingParams(max_new_tokens=31, temperature=1.0, top_p=0.7)  # its eos id is the engine's already
    assert read(model) == right


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"guidance_scale": 2.0},
        {"penalty_alpha": 0.5},
        {"token_healing": True},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_cannot_be_honoured_is_refused_by_name(options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(InvalidInputError, match=f"not supported in GenerationConfig: .*{name}="):
        read(**options)


REFUSED = {
    *("force_words_ids", "constraints", "guidance_scale", "watermarking_config", "token_healing", "stop_strings"),
    *("num_beams", "num_beam_groups", "penalty_alpha", "dola_layers", "is_assistant"),
    "assistant_ensemble_weight",
}


def test_every_field_of_this_transformers_is_known() -> None:
    """A field that a release adds is refused where it is set, until somebody has read what it does."""
    assert refused_fields() <= REFUSED


@pytest.mark.parametrize("options", [{}, {"top_p": 0.5, "eos_token_id": 3}, {"max_length": 30, "do_sample": False}])
def test_configs_are_merged_as_transformers_merges_them(options: dict[str, Any]) -> None:
    model = tiny_llama()
    model.generation_config = GenerationConfig(do_sample=True, top_p=0.7, top_k=0, eos_token_id=EOS, max_length=40)
    config = GenerationConfig(**options)
    right, _ = model._prepare_generation_config(config)  # type: ignore[operator]
    assert merged(config, model.generation_config) == right


def test_a_length_without_room_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="max_length=9 leaves no room after a prompt of 9 tokens"):
        read(max_length=9)


@pytest.mark.parametrize(
    "options", [{}, {"max_new_tokens": 12}, {"max_length": 25}, {"max_new_tokens": 24, "eos_token_id": [3, 50, 44]}]
)
@pytest.mark.cases(1)
def test_greedy_tokens_are_those_of_generate(options: dict[str, Any]) -> None:
    config = GenerationConfig(**options)
    ids = torch.tensor([PROMPT])
    right = tiny_llama().generate(ids, generation_config=config, attention_mask=torch.ones_like(ids), pad_token_id=0)
    model = tiny_llama()
    (completion,) = wrap(model, table_head(model), num_speculative_tokens=3).generate(PROMPT, config)
    assert PROMPT + completion.token_ids == right[0].tolist()


def test_stop_strings() -> None:
    text = "".join(LETTERS[t] for t in hf_greedy(PROMPT, 20))
    completions = wrap(tiny_llama()).generate(
        [PROMPT, PROMPT], GenerationConfig(max_new_tokens=20, stop_strings=[text[6:9]])
    )
    assert [c.text for c in completions] == [text[: text.find(text[6:9])]] * 2
    assert {c.finish_reason for c in completions} == {"stop"}


def test_stop_strings_that_begin_in_the_prompt_do_not_count() -> None:
    """transformers' criterion finds them: the documentation names the difference."""
    prompt = "".join(LETTERS[t] for t in PROMPT)
    text = "".join(LETTERS[t] for t in hf_greedy(PROMPT, 20))
    straddling = prompt[-2:] + text[:2]
    config = GenerationConfig(max_new_tokens=20, stop_strings=[straddling])
    (found,) = wrap(tiny_llama()).generate(PROMPT, config)
    assert straddling not in text and found.text == text and found.finish_reason == "length"
