"""`Stream.cancel`: a request ends with the tokens that it has, and no other notices."""

from __future__ import annotations

import threading

import pytest
from fakes import hf_greedy, random_prompts, table_head, tiny_llama, wrap

from specdec.requests.sampling import SamplingParams

PROMPTS = random_prompts((5, 20, 3, 9))
NEW = 24


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.cases(1)
def test_it_ends_with_its_tokens_and_the_others_go_on(drafts: int) -> None:
    target = tiny_llama()
    head = table_head(target) if drafts else None
    model = wrap(target, head, num_speculative_tokens=drafts, max_num_seqs=3, kv_cache_tokens=120)
    stream, done, texts = model.stream(PROMPTS, SamplingParams(NEW)), {}, dict.fromkeys(range(4), "")
    for update in stream:
        texts[update.index] += update.text
        if update.index == 1 and len(update.token_ids) and 1 not in done:
            stream.cancel(1, 3)  # one that runs, one that may wait
        if update.completion is not None:
            done[update.index] = update.completion
    assert [done[i].finish_reason for i in range(4)] == ["length", "cancelled", "length", "cancelled"]
    for i, prompt in enumerate(PROMPTS):
        right = hf_greedy(prompt, NEW)
        assert done[i].token_ids == right[: len(done[i].token_ids)] and texts[i] == done[i].text
    assert 0 < len(done[1].token_ids) < NEW and len(done[3].token_ids) < NEW
    assert model.usage().requests == 0 and model.usage().rows == 0
    assert model.generate(PROMPTS[3], SamplingParams(NEW))[0].token_ids == hf_greedy(PROMPTS[3], NEW)


def test_before_the_first_round_and_after_the_end() -> None:
    model = wrap(tiny_llama())
    stream = model.stream(PROMPTS[:2], SamplingParams(NEW))
    stream.cancel(0)
    reasons = {update.index: update.completion.finish_reason for update in stream if update.completion is not None}
    assert reasons == {0: "cancelled", 1: "length"}
    stream.cancel()
    stream.cancel(1, 99)
    assert list(stream) == []


def test_all_of_a_call_on_another_thread() -> None:
    model = wrap(tiny_llama())
    stream = model.stream(PROMPTS[:3], SamplingParams(200, ignore_eos=True))
    first = next(stream)
    other = threading.Thread(target=stream.cancel)
    other.start()
    other.join()
    reasons = [update.completion.finish_reason for update in stream if update.completion is not None]
    assert first.completion is None and reasons == ["cancelled"] * 3


def test_many_are_cancelled_in_a_time_that_grows_with_them_alone() -> None:
    """Each looks at its own place; by a list of all places it would be millions of looks."""
    looks = [0]

    class Place(int):
        def __eq__(self, other: object) -> bool:
            looks[0] += 1
            return int(self) == other

        __hash__ = int.__hash__

    model = wrap(tiny_llama())
    stream = model.stream([PROMPTS[2]] * 300, SamplingParams(2))
    stream.cancel(*map(Place, range(300)))
    done = [update.completion.finish_reason for update in stream if update.completion is not None]
    assert done.count("cancelled") > 290 and looks[0] < 3000


def test_cancelling_never_queues_a_call_a_second_time() -> None:
    """Another thread cancels while the first `next` queues the requests: they are queued once, and end."""
    model = wrap(tiny_llama())
    stream, submit, calls = model.stream(PROMPTS[:2], SamplingParams(NEW)), vars(model)["_shared"].submit, [0]

    def slow(*given: object) -> object:
        calls[0] += 1
        other = threading.Thread(target=stream.cancel)
        other.start()
        other.join()
        return submit(*given)

    vars(model)["_shared"].submit = slow
    done = [update.completion.finish_reason for update in stream if update.completion is not None]
    assert done == ["cancelled"] * 2 and calls == [1]


def test_a_stream_says_how_much_is_to_come() -> None:
    with wrap(tiny_llama()).stream(PROMPTS[:2], [SamplingParams(1), SamplingParams(NEW)]) as stream:
        assert repr(stream) == "Stream(2 of 2 completions to come)"
        while not (update := next(stream)).completion:
            pass
        assert update.index == 0 and repr(stream) == "Stream(1 of 2 completions to come)"
    assert repr(stream) == "Stream(0 of 0 completions to come)"
