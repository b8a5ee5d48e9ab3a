"""How requests end: eos, stop strings inside a round, stop ids, limits; and what a stream shows meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import (
    LETTERS,
    LetterTokenizer,
    engine_of,
    free_everywhere,
    hf_greedy,
    random_prompts,
    table_head,
    tiny_llama,
    wrap,
)

from specdec.requests.request import Completion
from specdec.requests.sampling import SamplingParams

PROMPTS = random_prompts((5, 33, 1, 17, 60, 9))
NEW = 24


def wrapped_with(eos: int | list[int] | None = None, num_drafts: int = 5, **options: Any) -> Any:
    model = tiny_llama()
    model.generation_config.eos_token_id = eos
    return wrap(model, table_head(model, disturbance=0.1), num_speculative_tokens=num_drafts, **options)


def text_of(tokens: list[int]) -> str:
    return LetterTokenizer().decode(tokens)


def cut_at(tokens: list[int], ends: set[int]) -> list[int]:
    """Up to and with the first token of `ends`."""
    places = [i for i, t in enumerate(tokens) if t in ends]
    return tokens[: places[0] + 1] if places else tokens


@pytest.mark.parametrize("num_drafts", [0, 5])
@pytest.mark.cases(1)
def test_an_eos_id_ends_a_row_inside_a_round(num_drafts: int) -> None:
    right = [hf_greedy(p, NEW) for p in PROMPTS]
    eos = [right[0][6], right[3][10]]
    wrapped = wrapped_with(eos, num_drafts)
    completions = wrapped.generate(PROMPTS, SamplingParams(max_new_tokens=NEW))
    assert [c.token_ids for c in completions] == [cut_at(r, set(eos)) for r in right]
    assert [c.finish_reason == "eos" for c in completions] == [bool(set(eos) & set(r)) for r in right]
    assert free_everywhere(wrapped)


def test_ignore_eos_goes_on() -> None:
    right = hf_greedy(PROMPTS[0], NEW)
    params = [SamplingParams(max_new_tokens=NEW, ignore_eos=True), SamplingParams(max_new_tokens=NEW)]
    on, off = wrapped_with(right[6]).generate([PROMPTS[0]] * 2, params)
    assert (on.token_ids, on.finish_reason) == (right, "length")
    assert (off.token_ids, off.finish_reason) == (cut_at(right, {right[6]}), "eos")


def test_stop_token_ids_end_only_their_own_row() -> None:
    right = hf_greedy(PROMPTS[3], NEW)
    params = [SamplingParams(max_new_tokens=NEW, stop_token_ids=(right[9],)), SamplingParams(max_new_tokens=NEW)]
    stopped, other = wrapped_with().generate([PROMPTS[3]] * 2, params)
    assert (stopped.token_ids, stopped.finish_reason) == (cut_at(right, {right[9]}), "stop")
    assert (other.token_ids, other.finish_reason) == (right, "length")


@pytest.mark.parametrize(
    ("span", "num_drafts"),
    [
        *(((4, 7), drafts) for drafts in (0, 5)),
        *(pytest.param(span, 5, marks=pytest.mark.slow) for span in ((3, 4), (0, 2), (10, 15), (22, 24))),
        *(pytest.param(span, 0, marks=pytest.mark.long) for span in ((3, 4), (0, 2), (10, 15), (22, 24))),
    ],
)
@pytest.mark.cases(1)
def test_a_stop_string_cuts_text_and_tokens(span: tuple[int, int], num_drafts: int) -> None:
    wrapped = wrapped_with(num_drafts=num_drafts)
    for prompt in PROMPTS[:4]:
        right = hf_greedy(prompt, NEW)
        text = text_of(right)
        stop = text[slice(*span)]
        end = text.find(stop) + len(stop)
        (completion,) = wrapped.generate(prompt, SamplingParams(max_new_tokens=NEW, stop=(stop,)))
        assert completion.token_ids == right[:end], "with the token that completed the stop"
        assert completion.text == text[: end - len(stop)]
        assert completion.finish_reason == "stop"
        assert completion.stats.new_tokens == end == 1 + sum(r.emitted for r in completion.stats.rounds)
        assert free_everywhere(wrapped)


def test_some_stop_lies_inside_a_round() -> None:
    """Otherwise the tests above would not test trimming."""

    def is_trimmed(prompt: list[int], stop: str) -> bool:
        (c,) = wrapped_with().generate(prompt, SamplingParams(max_new_tokens=NEW, stop=(stop,)))
        return any(r.emitted <= r.accepted for r in c.stats.rounds)

    texts = [(prompt, text_of(hf_greedy(prompt, NEW))) for prompt in PROMPTS]
    assert any(is_trimmed(prompt, right[i : i + 2]) for prompt, right in texts for i in range(2, 20))


def streamed(wrapped: Any, prompts: list[list[int]], params: Any) -> list[tuple[list[int], str, Completion]]:
    tokens: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    texts = dict.fromkeys(range(len(prompts)), "")
    done: dict[int, Completion] = {}
    for update in wrapped.stream(prompts, params):
        assert update.index not in done, "nothing comes after the completion"
        tokens[update.index] += update.token_ids
        texts[update.index] += update.text
        if update.completion is not None:
            done[update.index] = update.completion
    return [(tokens[i], texts[i], done[i]) for i in range(len(prompts))]


@pytest.mark.slow
def test_a_stream_adds_up_to_the_completion() -> None:
    params = [
        SamplingParams(max_new_tokens=NEW, stop=(text_of(hf_greedy(p, NEW))[i : i + 3], "zzz"))
        for i, p in enumerate(PROMPTS, 4)
    ]
    for tokens, text, completion in streamed(wrapped_with(), PROMPTS, params):
        assert tokens == completion.token_ids
        assert text == completion.text
        assert completion.finish_reason == "stop"


@pytest.mark.slow
def test_a_stream_never_shows_a_part_of_a_stop_string() -> None:
    text = text_of(hf_greedy(PROMPTS[1], NEW))
    stop = text[12:16]
    shown = ""
    for update in wrapped_with(num_drafts=0).stream(PROMPTS[1], SamplingParams(max_new_tokens=NEW, stop=(stop,))):
        shown += update.text
        assert text[:12].startswith(shown)
    assert shown == text[: text.find(stop)]


@pytest.mark.slow
def test_closing_a_stream_frees_everything() -> None:
    wrapped = wrapped_with()
    stream = wrapped.stream(PROMPTS, SamplingParams(max_new_tokens=NEW))
    for _ in range(7):
        next(stream)
    stream.close()
    assert free_everywhere(wrapped)
    assert wrapped.generate(PROMPTS[0], SamplingParams(max_new_tokens=NEW))[0].token_ids == hf_greedy(PROMPTS[0], NEW)


@pytest.mark.slow
def test_an_abort_leaves_the_others_alone() -> None:
    wrapped = wrapped_with()
    engine = engine_of(wrapped)
    ids = [engine.submit(p, SamplingParams(max_new_tokens=NEW)) for p in PROMPTS]
    done: dict[int, list[int]] = {}
    for turn in range(300):
        if turn == 4:
            engine.abort([ids[1], ids[5], 12345])  # running, waiting, unknown
            engine.abort([ids[1]])
        if not engine.has_work:
            break
        done |= {u.request_id: u.completion.token_ids for u in engine.step() if u.completion is not None}
    left = [i for i in range(6) if i not in (1, 5)]
    assert done == {ids[i]: hf_greedy(PROMPTS[i], NEW) for i in left}
    assert free_everywhere(wrapped)


def test_a_row_that_was_aborted_in_flight_makes_room_at_once() -> None:
    wrapped = wrapped_with(max_num_seqs=1)
    engine = engine_of(wrapped)
    first = engine.submit(PROMPTS[4], SamplingParams(max_new_tokens=NEW))
    engine.step()
    engine.step()
    engine.abort([first])
    assert free_everywhere(wrapped)
    engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=4))
    tokens: list[int] = []
    while engine.has_work:
        for update in engine.step():
            tokens += update.token_ids
    assert tokens == hf_greedy(PROMPTS[0], 4)


def test_two_streams_share_the_engine() -> None:
    """Rounds of one serve the other: neither loses tokens, whoever is asked first."""
    wrapped = wrapped_with(max_num_seqs=4, max_num_batched_tokens=48)
    params = SamplingParams(max_new_tokens=NEW)
    one, two = wrapped.stream(PROMPTS[0], params), wrapped.stream(PROMPTS[3], params)
    first = next(one)
    second = [token for update in two for token in update.token_ids]
    rest = [token for update in one for token in update.token_ids]
    assert second == hf_greedy(PROMPTS[3], NEW)
    assert first.token_ids + rest == hf_greedy(PROMPTS[0], NEW)
    assert free_everywhere(wrapped)


def test_letters_are_distinct() -> None:
    assert len(set(LETTERS)) == len(LETTERS) == 64
