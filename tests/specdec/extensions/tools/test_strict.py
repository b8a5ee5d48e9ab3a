"""Random models whose calls must follow their schemas: whatever is read as a call parses and is valid.

A bias draws each answer to a text, which may be a call with wrong arguments, spelled in one of several ways. Without a
grammar most of these calls are read with wrong arguments.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema
import numpy as np
import pytest

pytest.importorskip("llguidance")

from specdec import SamplingParams, SpeculativeModel
from specdec.errors import InvalidInputError
from specdec.extensions.grammars.compiled import compiler_of
from specdec.extensions.openai_format import response_of, tools_of, with_tools
from specdec.extensions.tools.answer_formats import FORMATS
from specdec.extensions.tools.tool_use import ToolUse, tool_use
from tests.fakes import tiny_llama, wrap
from tests.specdec.extensions.tools.families import ENDS, TEMPLATES, tokenizer_of

pytestmark = pytest.mark.slow
SCHEMAS: dict[str, dict[str, Any]] = {
    "f": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": -3, "maximum": 40}, "b": {"enum": ["x", '"}', "}] é"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "get-it": {"type": "object", "properties": {"c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]
STRICT = [name for name, own in FORMATS.items() if own.strict]
WRONG = {
    "hermes": [
        '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
        '<tool_call>{"arguments": 1, "name": "f"}',
    ],
    "llama3": ['{"name": "f", "parameters": {"a": 1}}', '{ "name" :"f","arguments":[1]}', '<|python_tag|>{"name":"f"'],
    "deepseek": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n[1]\n```<｜tool▁call▁end｜>",
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 99}<｜tool▁call▁end｜>',
    ],
}
CHOICES = ("required", {"type": "function", "function": {"name": "f"}})


@dataclass(frozen=True)
class Drawn:
    """A logits processor that draws an answer to these tokens, as long as it consists of them."""

    ids: tuple[int, ...]
    begin: int

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        before = tuple(input_ids[0, self.begin :].tolist())
        if before == self.ids[: len(before)] and len(before) < len(self.ids):
            scores = scores.clone()
            scores[0, self.ids[len(before)]] += 50.0
        return scores


@functools.cache
def model_of(family: str) -> SpeculativeModel:
    tokenizer = tokenizer_of(family)
    tokenizer.eos_token = ENDS[family]
    target = tiny_llama(len(tokenizer))
    target.config.max_position_embeddings = 400
    target.generation_config.eos_token_id = tokenizer.eos_token_id
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "page_size": 16, "kv_cache_tokens": 8192}
    found: SpeculativeModel = wrap(target, tokenizer=tokenizer, max_model_len=400, **sizes)
    return found


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    for family in TEMPLATES:
        model_of(family).close()
    model_of.cache_clear()


def spelled(tokenizer: Any, text: str, by_letter: bool) -> tuple[int, ...]:
    """The text's tokens, or tokens of one letter each, also of markers."""
    if not by_letter:
        return tuple(tokenizer(text, add_special_tokens=False).input_ids)
    return tuple(i for letter in text for i in tokenizer(letter, add_special_tokens=False).input_ids)


def read(family: str, use: ToolUse, seeds: Sequence[int], texts: Sequence[str]) -> list[dict[str, Any]]:
    """Messages of answers that are drawn to the texts and then are random, at temperature 1; those that were cut off,
    and so have no end, are left out."""
    model, prompt = model_of(family), [5, 6, 7]
    json_letters = spelled(model.tokenizer, '{}[]":,truefals 0123456789', True)
    asked = []
    for seed in seeds:
        draw = random.Random(seed)
        bias = {**dict.fromkeys(json_letters, draw.choice([0.0, 6.0])), model.tokenizer.eos_token_id: 7.0}
        ids = spelled(model.tokenizer, texts[seed % len(texts)], draw.random() < 0.5)
        drawn = Drawn(ids[: draw.randrange(len(ids) + 1) if seed % 3 == 2 else None], len(prompt))
        asked.append(
            SamplingParams(temperature=1.0, seed=seed, max_new_tokens=150, logit_bias=bias, logits_processor=drawn)
        )
    done = model.generate([prompt] * len(asked), [with_tools(params, use) for params in asked])
    found = response_of(done, model.tokenizer, True, use)["choices"]
    return [choice["message"] for choice, own in zip(found, done, strict=True) if own.finish_reason != "length"]


def checked(messages: Sequence[dict[str, Any]]) -> int:
    """How many calls there are, all of which are valid."""
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    for call in calls:
        jsonschema.validate(json.loads(call["arguments"]), SCHEMAS[call["name"]])
    return len(calls)


def use_of(family: str, choice: Any) -> ToolUse:
    return tools_of({"tools": TOOLS, "tool_choice": choice}, True, model_of(family).tokenizer, family)


@pytest.mark.thorough
@pytest.mark.parametrize("family", STRICT)
def test_strict_calls_beside_free_text_are_valid(family: str) -> None:
    assert checked(read(family, use_of(family, "auto"), range(32), WRONG[family])) > 8


@pytest.mark.parametrize("family", STRICT)
def test_other_markers_stay_free(family: str) -> None:
    """A model under a strict grammar may reason, and write every token but those that end or begin calls."""
    tokenizer, use = model_of(family).tokenizer, use_of(family, "auto")
    compiler = compiler_of(tokenizer, len(tokenizer), tokenizer.eos_token_id)
    assert use.grammar is not None
    mask = np.zeros((1, compiler.words), np.int32)
    assert compiler.fill([(compiler.compiled(use.grammar).matcher(), 0, [])], mask)
    added = tokenizer.convert_tokens_to_ids([*FORMATS[family].special, "<|im_start|>"])
    assert all(mask[0, token_id // 32] >> token_id % 32 & 1 for token_id in added)


@pytest.mark.long
@pytest.mark.parametrize("family", STRICT)
def test_many_strict_calls_are_valid(family: str) -> None:
    assert checked(read(family, use_of(family, "auto"), range(32, 400), WRONG[family])) > 100


@pytest.mark.thorough
@pytest.mark.parametrize("family", STRICT)
def test_the_texts_have_power(family: str) -> None:
    """Without a grammar wrong calls are read."""
    free = ToolUse(format=FORMATS[family], reads_calls=True)
    with pytest.raises((jsonschema.ValidationError, json.JSONDecodeError)):
        checked(read(family, free, range(32), WRONG[family]))


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.cases(2)
def test_required_and_named_calls_are_valid(family: str, choice: Any) -> None:
    """Where a template closes reasoning, a model that has not done so may say anything, and calls nothing."""
    begin, end = FORMATS[family].reasoning
    wrong = ["{1", '[{"name": "f", "parameters": {"a": 99}}]']
    one = '{"name": "get-it", "parameters": {}}'
    two = f"{begin and begin + 'hm' + end}[{one}, {one}]"
    messages = read(family, use_of(family, choice), range(24), [*wrong, begin + wrong[0] + end, two])
    assert checked(messages) > 4
    assert begin or all(message["content"] is None and message["tool_calls"] for message in messages)


@pytest.mark.parametrize("family", sorted({*TEMPLATES} - {*STRICT}))
def test_other_families_are_refused_by_name(family: str) -> None:
    message = 'strict=True: with tool_choice="auto" it is served for the families hermes, llama3, deepseek; .*required'
    with pytest.raises(InvalidInputError, match=message):
        tool_use({"tools": TOOLS}, FORMATS[family])
