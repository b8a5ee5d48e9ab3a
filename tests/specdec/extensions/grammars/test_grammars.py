"""Grammars under speculation: greedy tokens of `generate` with an oracle by brute force, in every pipeline; markers."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import regex
import torch
from fakes import (
    bigram_logits,
    engine_of,
    free_everywhere,
    launch_ahead,
    random_prompts,
    run_interrupted,
    table_head,
    tiny_llama,
    wrap,
)

from specdec import Grammar, InvalidInputError, RequestFailedError, SamplingParams
from specdec.execution import eager
from specdec.extensions.grammars.masks import GrammarColumns
from tests.specdec.execution.test_graphs import graphs_on_cpu, recorded_on_cpu, with_graphs  # noqa: F401 (fixtures)
from tests.specdec.extensions.grammars.spelled import (
    END,
    MARK,
    SPELLED,
    WHITE,
    Allowed,
    Matcher,
    right,
    text_of,
    tokenizer,
)

pytest.importorskip("llguidance")
NEW, K = 24, 4
PROMPTS = random_prompts((5, 9, 1, 7, 4, 11, 3, 6))
FEWER = 5
"""Prompts of `mixed`, each with every grammar: more show no other state of a grammar, only more of them at once."""
SPACE = f"(?:{WHITE}{{1,8}})?"
OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "on": {"type": "boolean"}},
    "required": ["a", "on"],
    "additionalProperties": False,
}
OBJECT_TEXT = SPACE.join([r"\{", '"a"', ":", "[0-9]", ",", '"on"', ":", "(?:true|false)", r"\}"])
GRAMMARS: list[tuple[Grammar, Allowed]] = [
    (Grammar.regex("[abc]{2,9}(?:[0-9]|xyz)"), Allowed("[abc]{2,9}(?:[0-9]|xyz)")),
    (Grammar.choice(["true", "false", "lab", "lal"]), Allowed("true|false|lab|lal")),
    (Grammar.lark('start: "{" (N ",")* N "}"\nN: /[0-9]{1,3}/'), Allowed(r"\{(?:[0-9]{1,3},)*[0-9]{1,3}\}")),
    (Grammar.json(OBJECT), Allowed(OBJECT_TEXT)),
    (Grammar.regex("(?:[a-f]|[0-9]){1,12}"), Allowed("(?:[a-f]|[0-9]){1,12}")),
]
FURTHER = [(0, True), (1, False), (1, True)]
"""(K, launched ahead): where the other number of drafts shows what is launched when."""
MARKED: list[tuple[Grammar, Allowed]] = [
    (Grammar.regex("[0-9]{1,3}", begin="e>", end="</"), Allowed("[0-9]{1,3}", "e>", "</")),
    (Grammar.regex("[0-9]{1,3}", begin=[MARK], end="."), Allowed("[0-9]{1,3}", "<mark>", ".")),
    (Grammar.regex("[abc]{3,5}", begin="a"), Allowed("[abc]{3,5}", "a")),
    (Grammar.choice(["12", "ab"], begin="<", end=">"), Allowed("12|ab", "<", ">")),
]
FAVOUR = dict.fromkeys((*range(14, 30), MARK, SPELLED.index("e>"), SPELLED.index("</"), SPELLED.index(">7")), 2.0)


SOME = [END, *range(5, 64, 2)]
"""Tokens of a reduced draft vocabulary."""


@cache
def target() -> Any:
    return tiny_llama()


def made(draft: Any = "head", **options: Any) -> Any:
    head = table_head(tiny_llama()) if draft == "head" else draft
    sizes = {"num_speculative_tokens": K, "max_num_seqs": 8, "max_num_batched_tokens": 44, "tokenizer": tokenizer()}
    return wrap(tiny_llama(), head, **(sizes | options))


def params(grammar: Any, **options: Any) -> SamplingParams:
    return SamplingParams(NEW, grammar=grammar, **{"stop_token_ids": (END,), "return_drafts": True} | options)


def mixed(cases: list[tuple[Grammar, Allowed]], **options: Any) -> tuple[list[Any], list[list[int]]]:
    """(prompt, parameters) of each prompt with each grammar, free rows between; and their right tokens."""
    asked, expected = [], []
    bias = options.get("logit_bias")
    for i, prompt in enumerate(PROMPTS[:FEWER]):
        for grammar, oracle in cases:
            asked.append((prompt, params(grammar, **options)))
            expected.append(right_tokens(i, oracle, bias is not None))
        asked.append((prompt, params(None, **options)))
        expected.append(right_tokens(i, Allowed("", "no such marker"), bias is not None))
    return asked, expected


@cache
def right_tokens(i: int, oracle: Allowed, favour: bool) -> list[int]:
    own = {"sequence_bias": [[[token], bias] for token, bias in FAVOUR.items()]} if favour else {}
    return right(target(), PROMPTS[i], oracle, NEW, **own)


def tokens(model: Any, asked: list[Any]) -> list[list[int]]:
    return [c.token_ids for c in model.generate([p for p, _ in asked], [own for _, own in asked])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "ahead"),
    [(0, False), (K, False), (K, True), *(pytest.param(*own, marks=pytest.mark.long) for own in FURTHER)],
)
@pytest.mark.cases(1)
def test_greedy_tokens_are_those_of_generate_with_an_oracle(k: int, ahead: bool) -> None:
    """In batches with free rows, prompts in chunks, more requests than rows."""
    model = made(num_speculative_tokens=max(k, 1))
    launch_ahead(model, ahead)
    asked, expected = mixed(GRAMMARS, num_speculative_tokens=k)
    found = model.generate([p for p, _ in asked], [own for _, own in asked])
    assert [c.token_ids for c in found] == expected and free_everywhere(model)
    assert (model.engine_stats.early_reads > 0) == (k > 0)
    for (_, own), completion in zip(asked, found, strict=True):
        if own.grammar is not None and completion.finish_reason == "stop":
            assert completion.token_ids[-1] == END and allows(own.grammar, text_of(completion.token_ids[:-1]))
    assert sum(c.finish_reason == "stop" for c in found) > 9
    if k:
        assert sum(r.accepted for c in found for r in c.stats.rounds) > 50


def allows(grammar: Grammar, text: str) -> bool:
    """Whether a whole text is of the grammar, by other means than llguidance."""
    if grammar == Grammar.json(OBJECT):
        own = json.loads(text)
        return set(own) == {"a", "on"} and 0 <= own["a"] <= 9 and isinstance(own["on"], bool)
    return regex.fullmatch(next(o.pattern for g, o in GRAMMARS if g == grammar), text) is not None


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.long), True])
def test_without_a_head_no_round_is_launched_before_the_last_is_read(ahead: bool) -> None:
    model = made(None, num_speculative_tokens=0)
    launch_ahead(model, ahead)
    asked, expected = mixed(GRAMMARS)
    assert tokens(model, asked) == expected


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, pytest.param(K, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_markers_begin_and_end_a_grammar_anywhere_in_a_round(k: int) -> None:
    """Several times in one answer; tokens that end the marker and go on as the grammar cannot do not come."""
    model = made(num_speculative_tokens=max(k, 1))
    asked, expected = mixed(MARKED, logit_bias=FAVOUR, num_speculative_tokens=k)
    found = model.generate([p for p, _ in asked], [own for _, own in asked])
    assert [c.token_ids for c in found] == expected
    begun = [text_of(c.token_ids).count(begin_of(own.grammar)) for c, (_, own) in zip(found, asked, strict=True)]
    assert sum(n > 0 for n in begun) > 8 and max(begun) > 1


SEEDS = (14, 10, 18, 26)
"""Answers of each case; its marker has ended at every offset after half to two thirds of them."""


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(MARKED)))
@pytest.mark.thorough
def test_markers_at_every_offset_of_a_round(case: int) -> None:
    """Drafts are the right tokens, or in a few places others: rounds accept up to all of them, from any position on."""
    grammar, oracle = MARKED[case]
    model, rng, offsets = made(max_num_seqs=1), random.Random(case), Counter[int]()
    for seed in range(SEEDS[case]):
        i, wrong = seed % len(PROMPTS), rng.random() / 3
        expected, known = right_tokens(i, oracle, True), [0]
        filled = eager.fill_drafts

        def knows(round_: Any, draft: Any) -> Any:
            if draft is not None and draft.token_ids.numel():
                own = (expected[known[0] :] + [0] * K)[: draft.token_ids.shape[1]]  # noqa: B023
                own = [rng.randrange(64) if rng.random() < wrong else token for token in own]  # noqa: B023
                draft.token_ids[:] = torch.tensor(own)
            return filled(round_, draft)  # noqa: B023

        found: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(eager, "fill_drafts", knows)
            for update in model.stream(PROMPTS[i], params(grammar, logit_bias=FAVOUR)):
                texts = [
                    text_of((found + update.token_ids)[:n])
                    for n in range(len(found), len(found + update.token_ids) + 1)
                ]
                counts = [text.count(begin_of(grammar)) for text in texts]
                offsets.update(at for at in range(len(counts) - 1) if counts[at + 1] > counts[at])
                found += update.token_ids
                known[0] = len(found)
        assert found == expected, (seed, text_of(found), text_of(expected))
    assert all(offsets[at] for at in range(K + 1)), offsets


def begin_of(grammar: Grammar | None) -> str:
    if grammar is None:
        return "no such marker"
    return grammar.begin if isinstance(grammar.begin, str) else text_of(grammar.begin or ())


@pytest.mark.slow
@pytest.mark.parametrize("cases", [GRAMMARS, MARKED])
@pytest.mark.thorough
def test_rounds_from_graphs(graphs_on_cpu: list[Any], cases: Any) -> None:  # noqa: F811
    options = {"logit_bias": FAVOUR} if cases is MARKED else {}
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 36, "tokenizer": tokenizer()}
    model = with_graphs(table_head(tiny_llama()), num_speculative_tokens=3, **sizes)
    asked, expected = mixed(cases, **options)
    assert tokens(model, asked) == expected
    plain = with_graphs(None, **sizes)
    assert tokens(plain, asked[:18]) == expected[:18]


@pytest.mark.slow
@pytest.mark.thorough
def test_sampled_rounds_from_graphs(graphs_on_cpu: list[Any]) -> None:  # noqa: F811
    """They are launched before the commit: what was accepted is known from the read alone."""
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "tokenizer": tokenizer()}
    model = with_graphs(table_head(tiny_llama()), num_speculative_tokens=3, **sizes)
    asked = [(p, params(own, temperature=0.7, seed=i)) for i, p in enumerate(PROMPTS[:FEWER]) for own, _ in GRAMMARS]
    found = model.generate([p for p, _ in asked], [own for _, own in asked])
    oracles = dict(GRAMMARS)
    for completion, (_, own) in zip(found, asked, strict=True):
        ids = completion.token_ids
        assert all(ids[at] in oracles[own.grammar].next_ids(ids[:at]) for at in range(len(ids)))
    assert sum(r.accepted < r.drafted for c in found for r in c.stats.rounds) > 30


@pytest.mark.slow
@pytest.mark.thorough
def test_drafts_are_those_of_the_row_when_others_have_left(graphs_on_cpu: list[Any]) -> None:  # noqa: F811
    """Three free requests end one after the other before the one with a grammar, whose drafts stay where they were."""
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "tokenizer": tokenizer()}
    model = with_graphs(table_head(tiny_llama()), num_speculative_tokens=3, **sizes)
    grammar, oracle = Grammar.regex("(?:[a-f][0-9]){15,}"), Allowed("(?:[a-f][0-9]){15,}")
    for i in range(4):
        free = [(PROMPTS[(i + n) % 8], replace(params(None), max_new_tokens=n)) for n in (5, 9, 13)]
        found = tokens(model, [*free, (PROMPTS[i], params(grammar))])
        assert found[3] == right_tokens(i, oracle, False)


@pytest.mark.slow
@pytest.mark.thorough
def test_preempted_requests_go_on_where_their_grammar_stood() -> None:
    model = made(kv_cache_tokens=76, max_model_len=60, enable_prefix_caching=False)
    asked, expected = mixed(GRAMMARS)
    assert tokens(model, asked) == expected and model.engine_stats.preemptions > 3


@pytest.mark.slow
@pytest.mark.thorough
def test_an_interrupt_at_any_round_changes_nothing() -> None:
    model = made()
    asked, expected = mixed([*GRAMMARS[:2], MARKED[2]])
    engine = engine_of(model)
    for at in (2, 3, 5, 8):
        numbers = [engine.submit(prompt, own, eos_token_ids=()) for prompt, own in asked[:4]]
        ends = run_interrupted(model, at)
        assert [ends[n].token_ids for n in numbers] == expected[:4]


@pytest.mark.slow
@pytest.mark.parametrize("k", [pytest.param(0, marks=pytest.mark.long), K])
@pytest.mark.thorough
def test_a_matcher_of_the_users_own(k: int) -> None:
    model = made(num_speculative_tokens=max(k, 1))
    cases: list[Any] = [(Matcher(oracle.pattern), oracle) for _, oracle in GRAMMARS]
    asked, expected = mixed(cases, num_speculative_tokens=k)
    assert tokens(model, asked) == expected


def test_beside_options_and_in_several_samples() -> None:
    """Penalties come after the grammar; each sample has a state of its own."""
    model = made()
    grammar, oracle = GRAMMARS[0]
    found = model.generate(PROMPTS[0], params(grammar, repetition_penalty=1.3, temperature=1.0, n=6, seed=3))
    assert len({tuple(c.token_ids) for c in found}) > 3
    assert all(regex.fullmatch(oracle.pattern, text_of(c.token_ids[:-1])) for c in found if c.token_ids[-1] == END)
    typical = model.generate(PROMPTS[0], params(grammar, typical_p=0.5, temperature=1.0, n=6, seed=3))
    assert all(oracle.possible(text_of([i for i in c.token_ids if i != END])) for c in typical)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_that_nothing_can_go_on_ends_its_request_alone(temperature: float) -> None:
    """The vocabulary has a and 1, but no é; and what drafts alone lead to ends nobody."""
    model = made()
    dead = replace(params(Grammar.regex("[ab12]{3}é")), temperature=temperature, seed=1)
    stream = model.stream([PROMPTS[0], PROMPTS[1]], [dead, params(GRAMMARS[0][0])])
    found: list[int] = []
    with pytest.raises(RequestFailedError, match=r"its grammar raised.*cannot go on"):
        for update in stream:
            found += update.token_ids if update.index == 1 else []
    assert found == right_tokens(1, GRAMMARS[0][1], False) and free_everywhere(model)


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, pytest.param(1, marks=pytest.mark.long), K])
@pytest.mark.cases(1)
def test_drafts_that_lead_nowhere_harm_nobody(k: int) -> None:
    """After a draft "l" nothing could come; the target says otherwise, and its request goes on."""
    grammar, nowhere = Grammar.regex("(?:lé|[ab]{2,6})+1"), SPELLED.index("l")
    model = made(num_speculative_tokens=max(k, 1))
    own = params(grammar, logit_bias={nowhere: -30.0}, num_speculative_tokens=k)
    with pytest.MonkeyPatch.context() as patch:
        filled = eager.fill_drafts

        def always(round_: Any, draft: Any) -> Any:
            if draft is not None and draft.token_ids.numel():
                draft.token_ids.fill_(nowhere)
            return filled(round_, draft)

        patch.setattr(eager, "fill_drafts", always)
        found = model.generate(PROMPTS, own)
    plain = model.generate(PROMPTS, replace(own, num_speculative_tokens=0))
    assert [c.token_ids for c in found] == [c.token_ids for c in plain] and any(
        SPELLED.index("a") in c.token_ids for c in found
    )


def test_what_is_refused_before_anything_starts() -> None:
    model = made()
    for given, words in (
        (Grammar.json({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (Grammar.json({"allOf": [{"type": "integer"}, {"type": "string"}]}), "[Uu]nsatisfiable"),
        (Grammar.regex("a(?=b)"), "look-around"),
        (Grammar.lark("start: nothing"), "unknown name"),
        (Grammar.regex("é"), "no tokens that spell"),
        (Grammar.choice(["no", "é"]), "no tokens that spell 'é'"),
        (Grammar.json({"enum": ["key"]}), "no tokens that spell"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            model.generate(PROMPTS[0], params(given))
    with pytest.raises(InvalidInputError, match="give stop_token_ids"):
        tokens(made(tokenizer=without_eos()), [(PROMPTS[0], SamplingParams(NEW, grammar=GRAMMARS[0][0]))])
    for given in ("[a-z]+", 5, Grammar, {"type": "json_schema"}, {"type": "xml"}):
        with pytest.raises(InvalidInputError, match=r"Grammar|response_format"):
            SamplingParams(grammar=given)
    for call in (
        lambda: Grammar("elsewhere", ""),  # type: ignore[arg-type]
        lambda: Grammar.choice([]),
        lambda: Grammar.json("{"),
        lambda: Grammar.json([1]),
        lambda: Grammar.regex("a", end="x"),
        lambda: Grammar.regex("a", begin=""),
        lambda: Grammar.structural_tag([{"begin": "<f>", "end": "</f>", "schema": {}}], ["<g"]),
    ):
        with pytest.raises(InvalidInputError):
            call()
    assert model.usage().requests == 0


def without_eos() -> Any:
    own = tokenizer().__class__(tokenizer_object=tokenizer().backend_tokenizer)
    assert own.eos_token_id is None
    return own


def test_response_formats() -> None:
    assert SamplingParams(grammar={"type": "text"}).grammar is None
    assert SamplingParams(grammar={"type": "json_object"}).grammar == Grammar.json({"type": "object"})
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT, "strict": True}}
    assert SamplingParams(grammar=given).grammar == Grammar.json(OBJECT)
    assert SamplingParams(grammar={"type": "regex", "regex": "a+"}).grammar == Grammar.regex("a+")


@pytest.mark.slow
def test_white_space_is_bounded() -> None:
    """A model that wants nothing else gets eight characters of it between two parts."""
    model = made()
    pad = {SPELLED.index(text): 50.0 for text in (" ", "\n", "  ", " \n")}
    (found,) = model.generate(PROMPTS[0], replace(params(Grammar.json(OBJECT), logit_bias=pad), max_new_tokens=80))
    runs = regex.findall(r"\s+", text_of(found.token_ids[:-1]))
    assert max(map(len, runs)) == 8 and len(runs) > 5 and json.loads(text_of(found.token_ids[:-1]))


@pytest.mark.slow
def test_structural_tags() -> None:
    model = made()
    tag = {"begin": "<ab>", "schema": {"type": "integer", "minimum": 0, "maximum": 9}, "end": "</e>"}
    grammar = Grammar.structural_tag([tag], ["<ab"])
    favour = {SPELLED.index("<"): 6.0, SPELLED.index("ab"): 6.0}
    found = model.generate(PROMPTS, params(grammar, logit_bias=favour))
    texts = [text_of([i for i in c.token_ids if i != END]) for c in found]
    assert any("<ab" in text for text in texts)
    for text in texts:
        for rest in text.split("<ab")[1:]:
            assert regex.match(r">\s*[0-9]\s*</e>", rest, partial=True), text


@pytest.mark.slow
def test_compiled_grammars_are_kept_by_content() -> None:
    from specdec.extensions.grammars.compiled import compiler_of

    compiler = compiler_of(tokenizer(), 64, END)
    one = compiler.compiled(Grammar.regex("[ab]{7}"))
    assert compiler.compiled(Grammar.regex("[ab]{7}")) is one
    for n in range(300):
        compiler.compiled(Grammar.regex(f"[ab]{{{n + 8}}}"))
    assert compiler.compiled(Grammar.regex("[ab]{7}")) is not one


def test_a_grammar_begins_anew_where_other_tokens_were_taken() -> None:
    """After an interrupt, for example: from the last reported token on."""
    from specdec.extensions.grammars.compiled import compiler_of
    from specdec.extensions.grammars.following import FollowedGrammar

    compiled = compiler_of(tokenizer(), 64, END).compiled(Grammar.regex("ab[12]c"))
    own, again = FollowedGrammar(compiled), FollowedGrammar(compiled)
    a, b, one, two, c = (SPELLED.index(text) for text in "ab12c")
    for ids, forced in (([a, b, one], [c]), ([a, b], []), ([a, b, two], [c]), ([a], [b]), ([a, b, one, c], [])):
        own.follow(ids)
        again = FollowedGrammar(compiled)
        again.follow(ids)
        assert own.forced() == again.forced() == forced, ids
        assert own.is_over == (len(ids) == 4)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, K])
@pytest.mark.cases(1)
def test_tokens_that_must_come_are_drafts(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are accepted; without a head they are all the drafts that there are."""
    give = GrammarColumns.give_forced

    def nothing_is_left(columns: Any, table: Any, row: int) -> None:
        assert not table.num_given[row], "what was given for the last round"
        give(columns, table, row)

    monkeypatch.setattr(GrammarColumns, "give_forced", nothing_is_left)
    for model in (made(num_speculative_tokens=k), made("lookup", num_speculative_tokens=k, lookup_min=9)):
        found = model.generate(PROMPTS, params(Grammar.regex("[ab]12121212[cd]{2}ends")))
        assert all(text_of(c.token_ids)[1:9] == "12121212" for c in found)
        rounds = [r for c in found for r in c.stats.rounds]
        assert sum(r.accepted for r in rounds) >= len(PROMPTS) * (6 if k > 1 else 4)
    assert all(r.accepted == r.drafted for r in rounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("known", "batched"),
    [
        (range(64), True),
        (SOME, False),
        pytest.param(range(64), False, marks=pytest.mark.long),
        pytest.param(SOME, True, marks=pytest.mark.long),
    ],
)
@pytest.mark.thorough
def test_first_drafts_are_the_best_that_may_come(
    known: Sequence[int], batched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what the head knows; where that is nothing, its best. The head knows the target's bigrams."""
    monkeypatch.setattr(GrammarColumns, "give_forced", lambda *_: None)
    table, ids = bigram_logits(target()), torch.tensor(list(known))
    head = table_head(tiny_llama(), 0.0, known=known)
    model = made(head, max_num_seqs=8 if batched else 1)
    asked, expected = mixed(GRAMMARS)
    found = model.generate([p for p, _ in asked], [own for _, own in asked])
    assert [c.token_ids for c in found] == expected
    changed = nothing = 0
    for completion, (_, own) in zip(found, asked, strict=True):
        oracle, new = next((o for g, o in GRAMMARS if g == own.grammar), None), 1
        for drafts, round_ in zip(completion.drafts, completion.stats.rounds, strict=True):
            scores = table[completion.token_ids[new - 1]][ids]
            may = range(64) if oracle is None else oracle.next_ids(completion.token_ids[:new])
            legal = torch.tensor([i in may for i in ids.tolist()])
            best = scores.argmax() if not legal.any() else scores.masked_fill(~legal, float("-inf")).argmax()
            nothing += not legal.any()
            changed += int(best != scores.argmax())
            assert list(drafts[:1]) == [ids[best]][: len(drafts)]
            new += round_.accepted + 1
    assert changed > 60 and (nothing > 3) == (len(known) < 64)


def test_masks_of_a_chain() -> None:
    """What llguidance writes for drafts, and rows behind one that may not come."""
    from specdec.extensions.grammars.compiled import compiler_of
    from specdec.extensions.grammars.following import FollowedGrammar

    compiler = compiler_of(tokenizer(), 64, END)
    own = FollowedGrammar(compiler.compiled(Grammar.regex("a[bc]d")))
    a, b, d = (SPELLED.index(c) for c in "abd")
    own.follow([a])
    rows = own.masks([b, b, d], compiler.words)
    masks = np.full((4, compiler.words), -1, np.int32)
    compiler.fill(rows.chains, masks)
    found = [{i for i in range(64) if row[i // 32] >> i % 32 & 1} for row in masks]
    assert found == [{b, SPELLED.index("c")}, {d}, set(range(64)), set(range(64))]
