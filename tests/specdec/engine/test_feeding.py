"""`generate_iter` reads an iterator only so far ahead as keeps the batch full, and keeps nothing of what has ended."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from specdec.engine.feeding import Feeding
from specdec.errors import InvalidInputError, RequestFailedError
from specdec.requests.request import Call, Completion, Update
from specdec.requests.sampling import SamplingParams
from tests import fakes

SHORT = SamplingParams(max_new_tokens=4)
PROMPTS = fakes.random_prompts([3 + i % 5 for i in range(60)])
ROWS = 3


@pytest.fixture(scope="module")
def model() -> Any:
    return fakes.wrap(fakes.tiny_llama(), max_num_seqs=ROWS)


@pytest.fixture(scope="module")
def right(model: Any) -> list[list[int]]:
    return [completion.token_ids for completion in model.generate(PROMPTS, SHORT)]


class Reader(Iterator[Any]):
    """An iterator that counts what was read of it."""

    def __init__(self, items: list[Any]) -> None:
        self.items, self.count = items, 0

    def __next__(self) -> Any:
        if self.count == len(self.items):
            raise StopIteration
        self.count += 1
        found = self.items[self.count - 1]
        if isinstance(found, BaseException):
            raise found
        return found


@pytest.mark.slow
@pytest.mark.thorough
def test_an_iterator_is_read_as_rows_get_free(model: Any, right: list[list[int]]) -> None:
    reader, found, ahead = Reader(PROMPTS), dict[int, list[int]](), []
    for index, completion in model.generate_iter(reader, SHORT):
        found[index] = completion.token_ids
        ahead.append(reader.count - len(found))
    assert [found[i] for i in range(len(PROMPTS))] == right
    assert max(ahead) <= 3 * ROWS and min(ahead[: -3 * ROWS]) >= ROWS  # bounded, and never fewer than rows


@pytest.mark.slow
def test_every_prompt_may_have_params(model: Any, right: list[list[int]]) -> None:
    pairs = [(prompt, SamplingParams(max_new_tokens=1 + i % 4)) for i, prompt in enumerate(PROMPTS[:9])]
    found = dict(model.generate_iter(iter([*pairs, (PROMPTS[9], None)]), max_new_tokens=2))
    assert [found[i].token_ids for i in range(10)] == [ids[:2] for ids in right[:10]]
    found = dict(model.generate_iter(iter(pairs)))
    assert [len(found[i].token_ids) for i in range(9)] == [1 + i % 4 for i in range(9)]


@pytest.mark.slow
def test_samples_have_places_as_in_a_list(model: Any) -> None:
    params = SamplingParams(max_new_tokens=3, temperature=1.0, seed=5, n=2)
    expected = [completion.token_ids for completion in model.generate(PROMPTS[:8], params)]
    found = dict(model.generate_iter(iter(PROMPTS[:8]), params))
    assert [found[i].token_ids for i in range(16)] == expected


@pytest.mark.slow
def test_what_the_iterator_raises_comes_after_the_prompts_before(model: Any, right: list[list[int]]) -> None:
    found: dict[int, Completion] = {}
    with pytest.raises(OSError, match="planted"):
        for index, completion in model.generate_iter(Reader([*PROMPTS[:5], OSError("planted")]), SHORT):
            found[index] = completion
    assert [found[i].token_ids for i in range(5)] == right[:5] and fakes.free_everywhere(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "prompt 4: the prompt is empty"),
        ([0] * 200, "prompt 4: the prompt has 200 tokens"),
        (7, "prompt 4: an iterator yields whole prompts, and 7 is a part of one"),
        ({"role": "user", "content": "a"}, "prompt 4: an iterator yields whole prompts"),
    ],
)
def test_a_bad_prompt_is_named_after_those_before_it_have_ended(model: Any, bad: Any, message: str) -> None:
    found: dict[int, Any] = {}
    with pytest.raises(InvalidInputError, match=message):
        for index, completion in model.generate_iter(Reader([*PROMPTS[:4], bad, *PROMPTS[5:]]), SHORT):
            found[index] = completion
    assert sorted(found) == [0, 1, 2, 3] and fakes.free_everywhere(model)


@pytest.mark.slow
def test_closing_ends_the_rest_and_reads_no_more(model: Any) -> None:
    reader = Reader(PROMPTS)
    pairs = model.generate_iter(reader, SHORT)
    next(pairs)
    pairs.close()
    assert reader.count <= 3 * ROWS and fakes.free_everywhere(model)


@pytest.mark.slow
def test_an_interrupt_in_the_iterator_is_raised_at_once(model: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        list(model.generate_iter(Reader([PROMPTS[0], KeyboardInterrupt()]), SHORT))
    assert fakes.free_everywhere(model)


def test_calls_that_read_no_iterator_name_the_one_that_does(model: Any) -> None:
    for call in (model.generate, model.stream):
        with pytest.raises(InvalidInputError, match="an iterator is read by generate_iter"):
            call(iter(PROMPTS))


def test_an_empty_iterator_and_several_params(model: Any) -> None:
    assert list(model.generate_iter(iter([]))) == []
    with pytest.raises(InvalidInputError, match="one for all, or it yields"):
        next(model.generate_iter(iter(PROMPTS), [SHORT]))


@pytest.mark.slow
def test_refused_items_are_told_in_place_and_the_rest_goes_on(model: Any, right: list[list[int]]) -> None:
    items = [prompt if i % 3 else [] for i, prompt in enumerate(PROMPTS)]
    ends = list(Feeding(lambda group: model.stream(group, SHORT), items, ROWS))
    refused = {end.item for end in ends if end.place < 0}
    assert refused == set(range(0, 60, 3)) and sorted(end.item for end in ends) == list(range(60))
    answers = {end.item: end.found.token_ids for end in ends if isinstance(end.found, Completion)}
    assert answers == {i: ids for i, ids in enumerate(right) if i % 3}


class Failing(fakes.LetterTokenizer):
    """Raises as it decodes one of the texts."""

    def decode(self, token_ids: list[int], **options: Any) -> str:
        if tuple(token_ids[:4]) == self.bad:
            raise ValueError("planted")
        return super().decode(token_ids, **options)

    bad: tuple[int, ...] = ()


@pytest.mark.slow
def test_a_request_that_fails_is_raised_at_the_end(right: list[list[int]]) -> None:
    tokenizer = Failing()
    model = fakes.wrap(fakes.tiny_llama(), tokenizer=tokenizer, max_num_seqs=ROWS)
    tokenizer.bad, found = tuple(right[2]), dict[int, Any]()
    with pytest.raises(RequestFailedError):
        for index, completion in model.generate_iter(iter(PROMPTS[:12]), SHORT):
            found[index] = completion
    assert sorted(found) == [i for i in range(12) if right[i] != right[2]]


def test_a_call_keeps_no_update_of_an_ended_request() -> None:
    call = Call()
    update = Update(3, [1], "", error=RequestFailedError("planted"))
    assert update.error is not None
    gone = weakref.ref(update.error)
    call.inbox.put(update)
    assert call.take() is update
    del update
    gc.collect()
    assert gone() is None
