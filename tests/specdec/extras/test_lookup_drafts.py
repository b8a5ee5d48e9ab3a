"""Drafts by lookup in an engine: greedy tokens of `generate`, drafts of an index made anew, distributions, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import (
    bigram_logits,
    engine_of,
    free_everywhere,
    hf_greedy,
    launch_ahead,
    random_prompts,
    run_interrupted,
    table_head,
    tiny_llama,
    wrap,
)
from scipy import stats
from transformers import GenerationConfig

from drafters.loops.lookup import TokenIndex
from specdec.acceptance import judge
from specdec.errors import HandoffMismatchError, HeadLoadError, InvalidInputError
from specdec.execution import eager
from specdec.execution.graphs import GraphExecutor
from specdec.extras.lookup_drafts import LookupColumns, LookupDrafts
from specdec.requests.sampling import SamplingParams
from tests.hybrids import tiny_hybrid
from tests.specdec.execution.test_graphs import graphs_on_cpu, recorded_on_cpu, with_graphs  # noqa: F401 (fixtures)

NEW = 30
ASKED = random_prompts((5, 9, 1, 7, 4, 11))
QUOTES = [[*prompt, *hf_greedy(prompt, 12), *prompt] for prompt in ASKED]
"""Prompts whose answers stand in them."""
GREEDY = SamplingParams(NEW, return_drafts=True)
LEAST, LONGEST = 2, 8
LOOKUP: dict[str, Any] = {"lookup_min": LEAST, "lookup_max": LONGEST}


def looking_up(draft: Any = "lookup", **options: Any) -> Any:
    return wrap(tiny_llama(), draft, **{**LOOKUP, "num_speculative_tokens": 4, **options})


def proposed(text: list[int], k: int, least: int = LEAST, longest: int = LONGEST) -> list[int]:
    """What an index made anew proposes after a text; nothing at the first token of a match."""
    index = TokenIndex(least, longest)
    index.extend(text[:-1])
    if not index.propose(1):
        return []
    index.extend(text[-1:])
    return index.propose(k)


def rounds_of(completion: Any) -> Iterator[tuple[list[int], list[int]]]:
    """The tokens before each round, and its drafts."""
    prompt, new = completion.prompt_token_ids, 1
    for drafts, round_ in zip(completion.drafts, completion.stats.rounds, strict=True):
        yield [*prompt, *completion.token_ids[:new]], list(drafts)
        new += round_.accepted + 1


def wrong_drafts(completion: Any, k: int, least: int = LEAST, longest: int = LONGEST, new: int = NEW) -> list[int]:
    """The rounds whose drafts are not those of an index made anew of the tokens before them."""
    limit = len(completion.prompt_token_ids) + new
    rounds = enumerate(rounds_of(completion))
    return [i for i, (text, own) in rounds if own != proposed(text, k, least, longest)[: max(limit - len(text) - 1, 0)]]


def replaced_drafts(completion: Any, k: int, least: int = LEAST, longest: int = LONGEST) -> int:
    """Rounds beside a head with drafts by lookup: all for which an index made anew proposes as many as they have."""
    count = 0
    for text, own in rounds_of(completion):
        found = proposed(text, k, least, longest)
        if len(found) >= len(own) > 0:
            assert own == found[: len(own)]
            count += 1
    return count


def acceptance(completions: list[Any]) -> tuple[int, int]:
    rounds = [r for completion in completions for r in completion.stats.rounds]
    return sum(r.accepted for r in rounds), sum(r.drafted for r in rounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "least", "ahead"),
    [
        *((1, 1, False), (7, 3, True)),
        *(
            pytest.param(k, k // 2 or 1, ahead, marks=pytest.mark.long)
            for k, ahead in ((1, True), (4, False), (4, True))
        ),
        pytest.param(7, 3, False, marks=pytest.mark.long),
    ],
)
@pytest.mark.cases(1)
def test_greedy_tokens_and_drafts_are_exact(k: int, least: int, ahead: bool) -> None:
    """With prompts in chunks, rows that wait for a row, and pages of each other's prompts."""
    model = looking_up(num_speculative_tokens=k, lookup_min=least, max_num_batched_tokens=max(24, 3 * (k + 1)))
    launch_ahead(model, ahead)
    prompts = [*QUOTES, *ASKED, *QUOTES[:2]]
    found = model.generate(prompts, GREEDY)
    for prompt, completion in zip(prompts, found, strict=True):
        assert completion.token_ids == hf_greedy(prompt, NEW)
        assert wrong_drafts(completion, k, least) == []
    accepted, drafted = acceptance(found)
    assert accepted > 100 and drafted > accepted and free_everywhere(model)
    assert any(r.drafted == 0 for c in found for r in c.stats.rounds), "rows without a match have no drafts"


@pytest.mark.slow
@pytest.mark.parametrize("pages", [84, pytest.param(400, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_preempted_requests_draft_as_they_would_have(pages: int) -> None:
    """Their index is made anew, and sampled tokens depend on each round's drafts."""
    params = [replace(GREEDY, temperature=0.4 * (i % 2), seed=i) for i in range(len(QUOTES))]
    alone = looking_up(max_num_seqs=1, max_model_len=60)
    right = [alone.generate([p], [own])[0] for p, own in zip(QUOTES, params, strict=True)]
    model = looking_up(kv_cache_tokens=pages, max_model_len=60, enable_prefix_caching=False)
    found = model.generate(QUOTES, params)
    assert [(c.token_ids, c.drafts) for c in found] == [(c.token_ids, c.drafts) for c in right]
    assert (model.engine_stats.preemptions > 0) == (pages == 84)


@pytest.mark.slow
@pytest.mark.thorough
def test_an_interrupt_at_any_round_changes_nothing() -> None:
    model = looking_up()
    right = [(c.token_ids, c.drafts) for c in model.generate(QUOTES[:3], GREEDY)]
    engine = engine_of(model)
    for at in range(2, 9):
        numbers = [engine.submit(q, GREEDY) for q in QUOTES[:3]]
        ends = run_interrupted(model, at)
        assert [(ends[n].token_ids, ends[n].drafts) for n in numbers] == right


@pytest.mark.slow
@pytest.mark.thorough
def test_rounds_from_graphs(graphs_on_cpu: list[Any]) -> None:  # noqa: F811
    """Rounds without drafts are launched before the last is read; one round after a match, none is."""
    options = {**LOOKUP, "num_speculative_tokens": 4}
    params = [replace(GREEDY, temperature=0.4 * (i % 2), seed=i) for i in range(len(QUOTES))]
    model = with_graphs("lookup", **options)
    for own in ([GREEDY] * len(QUOTES), params):
        right = looking_up().generate(QUOTES, own)
        found = model.generate(QUOTES, own)
        assert [c.token_ids for c in found] == [c.token_ids for c in right]
    assert acceptance(found)[0] > 20
    chained = [r.drafted for c in found for r in c.stats.rounds].count(0)
    assert chained > 3 and model.describe()["graphs"]["state"] == "on"


def test_rounds_ahead_while_nothing_matches(graphs_on_cpu: list[Any]) -> None:  # noqa: F811
    model = with_graphs("lookup", **LOOKUP, num_speculative_tokens=4, max_num_seqs=1)
    plain = with_graphs(None, max_num_seqs=1)
    ids = [list(range(3, 33))]
    for each in (model, plain):
        launched: list[Any] = []
        chain = engine_of(each).executor.launch_next
        engine_of(each).executor.launch_next = lambda *given, chain=chain, seen=launched: (
            seen.append(1),
            chain(*given),
        )[1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TokenIndex, "propose", lambda self, most: [])
            assert each.generate(ids, SamplingParams(20))[0].token_ids == hf_greedy(ids[0], 20)
        assert len(launched) == 18


def transitions(model: Any, prompts: list[list[int]], vocab: int) -> np.ndarray:
    """[V, V]: how often each token followed each, in sampled answers."""
    counts = np.zeros((vocab, vocab))
    params = [SamplingParams(40, temperature=1.0, seed=i) for i in range(len(prompts))]
    for prompt, completion in zip(prompts, model.generate(prompts, params), strict=True):
        text = [prompt[-1], *completion.token_ids]
        np.add.at(counts, (text[:-1], text[1:]), 1)
    return counts


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Of all rows of a table of transitions, cells with fewer than 5 expected ones together."""
    expected = probs * counts.sum(1, keepdims=True)
    small = expected < 5
    cells = [(counts[~small], expected[~small])]
    if expected[small].sum() >= 5:
        cells.append((np.array([counts[small].sum()]), np.array([expected[small].sum()])))
    found, right = (np.concatenate(each) for each in zip(*cells, strict=True))
    return float(stats.chi2.sf(float(((found - right) ** 2 / right).sum()), len(found) - len(counts)))


def keep_q_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = judge.filled_drafts
    monkeypatch.setattr(eager, "filled_drafts", lambda *given: replace(plain(*given), replaced=None))


def drafts_are_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted whatever the target thinks of them."""
    plain = judge.accept_sampled
    monkeypatch.setattr(
        judge,
        "accept_sampled",
        lambda drafts, n, inputs: plain(drafts, n, replace(inputs, accept_uniform=inputs.accept_uniform * 0.5)),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beside", "plant"),
    [
        *((False, None), (True, None)),
        pytest.param(True, keep_q_of_the_head, marks=pytest.mark.long),
        pytest.param(False, drafts_are_certain, marks=pytest.mark.long),
    ],
)
@pytest.mark.thorough
def test_sampled_tokens_have_the_targets_distribution(
    beside: bool, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 answers of 40 tokens, each token after the one before it: a bigram model says what follows what."""
    vocab = 16
    target = tiny_llama(vocab, context=0.0)
    probs = torch.softmax(bigram_logits(target).double() / 1.0, 1).numpy()
    draft = [table_head(target, disturbance=2.0), "lookup"] if beside else "lookup"
    sizes = {"max_num_seqs": 100, "max_num_batched_tokens": 800, "kv_cache_tokens": 6400}
    k = 1 if beside else 3
    model = wrap(target, draft, lookup_min=1, lookup_max=4, num_speculative_tokens=k, **sizes)
    if plant is not None:
        plant(monkeypatch)
    prompts = random_prompts([9] * 200, vocab_size=vocab)
    counts = transitions(model, prompts, vocab)
    assert counts.sum() == 8_000 and model.engine_stats.tau > 1.05
    assert (p_value(counts, probs) > 1e-3) == (plant is None)


@pytest.mark.slow
@pytest.mark.parametrize("k", [pytest.param(3, marks=pytest.mark.long), 6])
@pytest.mark.thorough
def test_a_long_match_replaces_the_drafts_of_a_head(k: int) -> None:
    """Where there are as many as the row may have; other rows keep the head's."""
    model = wrap(
        tiny_llama(),
        [table_head(tiny_llama()), "lookup"],
        **LOOKUP,
        num_speculative_tokens=k,
        max_num_batched_tokens=24,
    )
    head = wrap(tiny_llama(), table_head(tiny_llama()), num_speculative_tokens=k, max_num_batched_tokens=24)
    prompts = [*QUOTES, *ASKED]
    found, of_head = model.generate(prompts, GREEDY), head.generate(prompts, GREEDY)
    looked_up = 0
    for prompt, completion, own in zip(prompts, found, of_head, strict=True):
        assert completion.token_ids == hf_greedy(prompt, NEW) == own.token_ids
        looked_up += replaced_drafts(completion, k)
    assert looked_up > 20 and any(a.drafts != b.drafts for a, b in zip(found, of_head, strict=True))
    assert "TableHead and lookup" in repr(model) and free_everywhere(model)


def advanced_by_rejected_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LookupColumns.commit

    def planted(self: Any, table: Any, rows: Any, committed: Any, notes: Any) -> None:
        for row in rows.tolist():
            if self.indexes[row] is not None and table.given.shape[1] > 1 and table.given[row, 1]:
                self.indexes[row].extend([int(table.given[row, 1])])
        plain(self, table, rows, committed, notes)

    monkeypatch.setattr(LookupColumns, "commit", planted)


def of_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LookupColumns, "close", lambda self, row: None)
    plain = LookupColumns.open

    def planted(self: Any, table: Any, row: int, params: Any) -> None:
        if self.indexes[row] is None:
            plain(self, table, row, params)

    monkeypatch.setattr(LookupColumns, "open", planted)


def one_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TokenIndex.propose
    monkeypatch.setattr(TokenIndex, "propose", lambda self, most: plain(self, most)[1:])


@pytest.mark.long
@pytest.mark.parametrize("plant", [advanced_by_rejected_tokens, of_another_request, one_behind])
def test_planted_defects_change_no_token_and_are_seen_in_the_drafts(
    plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right_propose = TokenIndex.propose
    plant(monkeypatch)
    model = looking_up(max_num_seqs=2)
    found = model.generate(QUOTES, GREEDY)
    monkeypatch.setattr(TokenIndex, "propose", right_propose)
    assert [c.token_ids for c in found] == [hf_greedy(p, NEW) for p in QUOTES]
    assert any(wrong_drafts(c, 4) for c in found)


def test_requests_without_drafts_have_no_index_and_n_samples_have_their_own() -> None:
    model = looking_up()
    columns = next(each for each in engine_of(model).table.extras if isinstance(each, LookupColumns))
    assert model.generate(QUOTES[:1], SamplingParams(6, num_speculative_tokens=0))[0].stats.rounds[-1].drafted == 0
    params = SamplingParams(NEW, temperature=0.5, seed=3, n=3, return_drafts=True)
    found = model.generate(QUOTES[:1], params)
    assert len({tuple(c.token_ids) for c in found}) > 1
    for completion in found:
        assert wrong_drafts(completion, 4) == []
    assert columns.indexes == [None] * 3


@pytest.mark.parametrize(
    ("draft", "options", "message"),
    [
        ("lookup", {"lookup_min": 4, "lookup_max": 3}, r"lookup_max=3: allowed is lookup_min=4 or more"),
        (["lookup", "lookup"], {}, r'of lists, allowed are \[head, "lookup"\] and \["lookup"\]'),
        (["a", "b", "lookup"], {}, "of lists, allowed are"),
        (["a", "b"], {}, "is no draft head"),
        (
            None,
            {"num_speculative_tokens": 2},
            "num_speculative_tokens=2 needs a draft head: give draft=… .*lookup. needs none",
        ),
        ("lookup", {"lookup_min": 0}, "lookup_min=0"),
        ("lokup", {}, "did you mean 'lookup', drafts without a head"),
    ],
)
def test_what_cannot_be_is_refused(draft: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidInputError, HeadLoadError), match=message):
        wrap(tiny_llama(), draft, **options)


def test_transformers_own_option_is_answered_with_the_right_call() -> None:
    with pytest.raises(InvalidInputError, match=r'prompt_lookup_num_tokens=4; drafts by lookup.*draft="lookup"'):
        looking_up().generate(QUOTES[:1], GenerationConfig(max_new_tokens=4, prompt_lookup_num_tokens=4))


def test_what_describes_it() -> None:
    model = looking_up(num_speculative_tokens=None, max_num_batched_tokens=27)
    assert "lookup" in repr(model) and "K=8" in repr(model)
    assert model.describe()["engine"]["lookup"] == {"min": LEAST, "max": LONGEST, "shared": False}


@pytest.mark.slow
@pytest.mark.thorough
def test_beside_a_head_in_graphs_matches_replace_the_drafts_of_greedy_requests(
    graphs_on_cpu: list[Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With rows that sample beside them, which have the head's drafts, as without lookups."""
    make = lambda draft, **more: with_graphs(draft, num_speculative_tokens=3, max_num_seqs=5, **more)  # noqa: E731
    both, head = make([table_head(tiny_llama()), "lookup"], **LOOKUP), make(table_head(tiny_llama()))
    bucket_of, of_sampled = vars(GraphExecutor)["_bucket_of"], list[Any]()

    def noted(executor: Any, target: Any, sampling: Any) -> Any:
        found = bucket_of(executor, target, sampling)
        if target.given is not None and sampling is not None:
            of_sampled.append(found)
        return found

    monkeypatch.setattr(GraphExecutor, "_bucket_of", noted)
    params = [replace(GREEDY, temperature=0.8 * (i % 3 == 2), seed=i) for i in range(len(QUOTES))]
    found, of_head = both.generate(QUOTES, params), head.generate(QUOTES, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in of_head]
    looked_up = 0
    for completion, own, asked in zip(found, of_head, params, strict=True):
        if asked.temperature:
            assert completion.drafts == own.drafts
        else:
            looked_up += replaced_drafts(completion, 3)
    assert looked_up > 5 and both.describe()["graphs"]["state"] == "on"
    assert of_sampled and not any(of_sampled)  # a graph would take the head's distributions for theirs


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(("sampling", "temperature"), [("rejection", 0.0), ("keyed", 0.4)])
def test_beside_a_head_graphs_of_whole_rounds_verify_drafts_by_lookup(
    graphs_on_cpu: list[Any],  # noqa: F811
    sampling: str,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of greedy and of keyed rows: their drafts have no distribution, and none is needed."""
    options: dict[str, Any] = {"num_speculative_tokens": 3, "max_num_seqs": 5, "sampling": sampling}
    both = with_graphs([table_head(tiny_llama()), "lookup"], **options, **LOOKUP)
    give, given = vars(GraphExecutor)["_give"], list[Any]()

    def noted(executor: Any, target: Any, drafts: Any) -> None:
        given.append(drafts)
        give(executor, target, drafts)

    monkeypatch.setattr(GraphExecutor, "_give", noted)
    params = [replace(GREEDY, temperature=temperature * (i % 3), seed=i) for i in range(len(QUOTES))]
    found, right = both.generate(QUOTES, params), wrap(tiny_llama(), sampling=sampling).generate(QUOTES, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in right]
    looked_up = [(own.temperature > 0, replaced_drafts(c, 3)) for c, own in zip(found, params, strict=True)]
    assert all(sum(n for hot, n in looked_up if hot is kind) > 5 for kind in {False, temperature > 0})
    assert both.describe()["graphs"]["state"] == "on" and len(given) > 5


HANDED = [replace(GREEDY, temperature=0.4 * (i % 2), seed=i) for i in range(len(QUOTES))]


@pytest.mark.slow
@pytest.mark.parametrize("beside", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.thorough
def test_requests_that_move_draft_as_they_would_have(beside: bool) -> None:
    def make(**more: Any) -> Any:
        draft = [table_head(tiny_llama()), "lookup"] if beside else "lookup"
        return looking_up(draft, kv_cache_layout="HND", **more)

    right = make().generate(QUOTES, HANDED)
    reads, goes_on = make(), make()
    for each in (reads, goes_on):
        each.open_transfer("local")
    found = goes_on.resume(reads.prefill(QUOTES, HANDED))
    assert [(c.token_ids, c.drafts) for c in found] == [(c.token_ids, c.drafts) for c in right]
    assert acceptance(found)[0] > 20 and free_everywhere(goes_on)
    other = make(lookup_min=LEAST + 1)
    other.open_transfer("local")
    with pytest.raises(HandoffMismatchError, match="drafts without a head"):
        other.resume(reads.prefill(QUOTES[:1], GREEDY))
    reads.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_next", pytest.param("mamba2", marks=pytest.mark.long)])
@pytest.mark.thorough
def test_targets_with_recurrent_layers(kind: str) -> None:
    """Rejected drafts leave their states as they were."""
    target, params = tiny_hybrid(kind), SamplingParams(24)
    plain = wrap(target, max_model_len=64)
    prompts = [p[:6] for p in QUOTES]
    prompts = [[*p, *c.token_ids[:9], *p] for p, c in zip(prompts, plain.generate(prompts, params), strict=True)]
    model = wrap(target, "lookup", max_model_len=64, num_speculative_tokens=4, lookup_min=1, lookup_max=8)
    found = model.generate(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in plain.generate(prompts, params)]
    accepted, drafted = acceptance(found)
    assert 0 < accepted < drafted


@pytest.mark.parametrize(
    ("greedy", "temperature", "drafts", "has"),
    [
        (False, 0.0, True, True),
        (False, 1.0, True, True),
        (True, 0.0, True, True),
        (True, 1.0, True, False),
        (False, 0.0, False, False),
    ],
)
def test_which_requests_have_an_index(greedy: bool, temperature: float, drafts: bool, has: bool) -> None:
    """Those that draft; beside a head's graphs greedy ones alone."""
    lookup = LookupDrafts(LEAST, LONGEST, greedy=greedy)
    columns = LookupColumns(lookup, 1)
    table: Any = SimpleNamespace(drafts=np.array([4 * drafts]), computed=np.zeros(1, int), prefill=np.array([3]))
    table.tokens = np.array([[1, 2, 3]])
    columns.open(table, 0, SamplingParams(temperature=temperature))
    assert (columns.indexes[0] is not None) == has
    assert lookup.facts() == {"lookup": {"min": LEAST, "max": LONGEST, "shared": False}}


@pytest.mark.parametrize(
    ("own", "others", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], [2, 3, 7], [4, 9, 1]),  # a longer match of its own
        ([2, 3, 4, 9, 2, 3], [2, 3, 7], [4, 9]),  # as long a match
        ([2, 3, 4, 9, 1, 2, 3], [1, 2, 3, 7, 8], [7, 8]),  # a longer match in another text
        ([9, 1, 2, 3], [2, 3, 7], [7]),  # no match of its own
    ],
)
def test_of_matches_in_its_own_text_and_in_others_the_longer_counts(
    own: list[int], others: list[int], drafts: list[int]
) -> None:
    """Of equal ones its own; drafts, one for each token of the match, end with their text."""
    columns = LookupColumns(LookupDrafts(LEAST, LONGEST, shared=True), 1)
    assert columns.shared_texts is not None
    columns.shared_texts.add(others)
    index = TokenIndex(LEAST, LONGEST)
    index.extend(own)
    assert columns.proposed(index, 3) == drafts


@pytest.mark.slow
def test_shared_texts_are_those_of_ended_requests() -> None:
    """Not of private ones, nor of any by default; tokens stay."""
    prompt, right = ASKED[1], hf_greedy(ASKED[1], NEW)

    def drafted(model: Any, first: SamplingParams) -> int:
        assert model.generate([prompt], first)[0].token_ids == right
        (found,) = model.generate([prompt], GREEDY)
        assert found.token_ids == right
        return found.stats.rounds[1].accepted

    shared = {"lookup_shared": True, "lookup_min": 1}
    assert drafted(looking_up(**shared), GREEDY) == 4
    assert drafted(looking_up(**shared), replace(GREEDY, cache_prefix=False)) == 0
    assert drafted(looking_up(lookup_min=1), GREEDY) == 0
