"""Grammars of all kinds under drafts: greedy tokens are those without drafts, and what ended is valid.

Half of the requests go on after their grammar's end (ignore_eos); ends are texts, ids of ordinary tokens, or none.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import numpy as np
import pytest

from specdec import Completion, Grammar, SamplingParams, SpeculativeModel
from specdec.extensions.grammars.compiled import GrammarCompiler, compiler_of
from specdec.loading.names import resolve
from specdec.loading.tokenizers import open_tokenizer

DRAFTS = (1, 3, 8)
PATTERNS = (r"[a-c]{2,6}", r"\d{1,4}(\.\d)?", r"(ab|cd)+", "yes|no", r"[A-Z][a-z]{1,5}( [a-z]{2,4}){0,2}", "a{2,}b?")
WORDS = ("yes", "no", "seven", "7", "It is 12.", "perhaps", "eggs")
QUESTIONS = ("How many eggs are left?", "Is it 12?", "Tom has 3 boxes of 12 eggs.", "What is 4 + 4?", "Write a list.")


@dataclass(frozen=True)
class Case:
    """A request with a grammar. pattern or schema: what its body must match; end: the text after it, or ""."""

    prompt: str
    params: SamplingParams
    body: str | dict[str, Any]
    end: str

    def check(self, done: Completion, eos: int) -> None:
        """Raise where an answer that came to its grammar's end is not valid."""
        text = done.text
        if done.finish_reason == "length" and done.token_ids[-1] != eos:
            return
        rest = self._after_the_body(text)
        assert rest is not None, (self, text)
        assert rest == "" or (self.end and rest.startswith(self.end)), (self, text)

    def _after_the_body(self, text: str) -> str | None:
        if isinstance(self.body, str):
            found = [n for n in range(len(text) + 1) if re.fullmatch(self.body, text[:n])]
            fits = [text[n:] for n in found if not text[n:] or (self.end and text[n:].startswith(self.end))]
            return fits[0] if fits else None
        value, at = json.JSONDecoder().raw_decode(text.lstrip(" \n\t\r"))
        jsonschema.validate(value, self.body)
        return text.lstrip(" \n\t\r")[at:].lstrip(" \n\t\r") if self.end.strip() else text.lstrip(" \n\t\r")[at:]


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["integer", "boolean", "string", "enum", *(["object", "array"] if depth < 2 else [])]
    kind = "object" if depth == 0 else rng.choice(kinds)
    if kind == "object":
        own = {name: schema(rng, depth + 1) for name in rng.sample("abcde", rng.randint(1, 3))}
        return {"type": "object", "properties": own, "required": list(own), "additionalProperties": False}
    if kind == "array":
        return {"type": "array", "items": schema(rng, depth + 1), "minItems": 1, "maxItems": 2}
    if kind == "enum":
        return {"enum": rng.sample(WORDS, 2)}
    bounds = {"integer": {"minimum": rng.randint(-9, 0), "maximum": rng.randint(1, 99)}, "string": {"maxLength": 5}}
    return {"type": kind, **bounds.get(kind, {})}


def case(seed: int, tokenizer: Any) -> Case:
    rng = random.Random(seed)
    kind = ("choice", "regex", "json", "lark")[seed % 4]
    own: Any = rng.sample(WORDS, rng.randint(1, 3)) if kind == "choice" else rng.choice(PATTERNS)
    body: str | dict[str, Any] = "|".join(map(re.escape, own)) if kind == "choice" else own
    if kind == "json":
        own = body = schema(rng)
    elif kind == "lark":
        own, body = 'start: "x" NUM ("," NUM)*\nNUM: /[0-9]{1,3}/', r"x\d{1,3}(,\d{1,3})*"
    end = rng.choice(["", "", ">>", " end", "\n"])
    prompt, marks = rng.choice(QUESTIONS), {}
    if end:
        as_ids = rng.random() < 0.5
        ids = tuple(tokenizer(end, add_special_tokens=False).input_ids)
        end = tokenizer.decode(ids) if as_ids else end
        prompt, marks = prompt + " <<", {"begin": " <<", "end": ids if as_ids else end}
    params = SamplingParams(
        grammar=getattr(Grammar, kind)(own, **marks), max_new_tokens=40, ignore_eos=seed // 4 % 2 == 1
    )
    return Case(prompt, params, body, end)


@pytest.fixture(scope="module")
def models() -> Iterator[dict[int, SpeculativeModel]]:
    sizes = {"max_num_seqs": 32, "kv_cache_tokens": 8192, "max_model_len": 256}
    made = {0: SpeculativeModel.from_pretrained("gsm-llama", device="cpu", **sizes)}
    for k in DRAFTS:
        draft = "lookup" if k == 8 else "auto"
        made[k] = SpeculativeModel.from_pretrained("gsm-llama", draft, num_speculative_tokens=k, device="cpu", **sizes)
    yield made
    for model in made.values():
        model.close()


def compare(seeds: range, models: dict[int, SpeculativeModel]) -> list[Completion]:
    cases = [case(seed, models[0].tokenizer) for seed in seeds]
    prompts, params = [each.prompt for each in cases], [each.params for each in cases]
    plain = models[0].generate(prompts, params)
    for each, done in zip(cases, plain, strict=True):
        each.check(done, models[0].tokenizer.eos_token_id)
    for k in DRAFTS:
        found = models[k].generate(prompts, params)
        for each, one, other in zip(cases, plain, found, strict=True):
            assert other.token_ids == one.token_ids and other.finish_reason == one.finish_reason, (k, each)
    return plain


@pytest.mark.slow
@pytest.mark.thorough
def test_tokens_under_a_grammar_are_those_without_drafts(models: dict[int, SpeculativeModel]) -> None:
    plain = compare(range(24), models)
    eos = models[0].tokenizer.eos_token_id
    assert sum(done.token_ids[-2:] == [eos, eos] for done in plain) > 3, "some go on after their grammar's end"


@pytest.mark.long
def test_two_hundred_grammars(models: dict[int, SpeculativeModel]) -> None:
    plain = compare(range(200), models)
    assert sum(done.finish_reason != "length" for done in plain) > 20


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"min_new_tokens": 6}, {"suppress_tokens": [1, 2]}])
@pytest.mark.thorough
def test_options_that_leave_nothing_are_named_with_drafts_too(
    options: dict[str, Any], models: dict[int, SpeculativeModel]
) -> None:
    params = SamplingParams(grammar=Grammar.choice(["yes", "no"]), max_new_tokens=8, **options)
    said = set()
    for k in (0, *DRAFTS):
        with pytest.raises(Exception, match="its options raised ValueError: no token can be chosen") as raised:
            models[k].generate("Is it?", params)
        said.add(str(raised.value))
    assert len(said) == 1


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = open_tokenizer(resolve("gsm-llama"), None)
    return compiler_of(tokenizer, len(tokenizer), tokenizer.eos_token_id)


def allowed(compiler: GrammarCompiler, matcher: Any) -> list[int]:
    mask = np.zeros((1, compiler.words), np.int32)
    assert compiler.fill([(matcher, 0, [])], mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_a_rollback_over_a_token_given_by_its_id_ruins_a_matcher(compiler: GrammarCompiler) -> None:
    """Why copies are followed: fails when llguidance mends it."""
    end = compiler.tokenizer.tokenize_str(">>")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    matcher = compiler.compiled(Grammar.json(schema, begin="<<", end=tuple(end))).matcher()
    body = compiler.tokenizer.tokenize_str('{"a": 12}')
    assert matcher.try_consume_tokens(body) == len(body)
    copy, before = matcher.deep_copy(), allowed(compiler, matcher)
    assert matcher.try_consume_tokens(end) == len(end)
    matcher.rollback(len(end))
    assert allowed(compiler, matcher) != before
    assert allowed(compiler, copy) == before == [end[0]]
