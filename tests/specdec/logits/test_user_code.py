"""Processors, prefix functions and stopping criteria of the user: tokens are those of transformers' generate with the
same objects, drafted or not, in every pipeline, with preemptions and interrupts; each request's errors are its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import VOCAB, tiny_llama, wrap
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation import logits_process as hf

from specdec.engine.engine import Engine
from specdec.errors import HandoffMismatchError, InvalidInputError, RequestFailedError
from specdec.extensions.handoff.moved import Leaving
from specdec.extensions.handoff.moving import moving_requests
from specdec.requests import user_code
from specdec.requests.sampling import SamplingParams
from specdec.requests.user_code import RequestProcessors
from specdec.rounds.extras import RoundExtra
from tests.specdec.execution.test_graphs import graphs_on_cpu, recorded_on_cpu  # noqa: F401
from tests.specdec.rounds.test_extras import NEW, PROMPTS, answers, engine_with


class Paced(LogitsProcessor):
    """Bans tokens by how often it was called: a call too many or too few changes answers."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        banned = torch.arange(VOCAB) % 3 == self.calls % 3
        return scores.masked_fill(banned[None], float("-inf"))


class Fading(LogitsProcessor):
    """Takes from the scores a mean of all that it has seen: tokens depend on every earlier position's scores."""

    def __init__(self) -> None:
        self.mean = torch.zeros(1, VOCAB)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.mean = 0.6 * self.mean + scores / 2
        return scores - self.mean


class Locked(Paced):
    """It cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class AtSum(StoppingCriteria):
    """Stops where the last three tokens add up to a multiple of a number; counts its calls."""

    def __init__(self, number: int = 5) -> None:
        self.number, self.calls = number, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return (input_ids[:, -3:].sum(1) % self.number == 0) & (self.calls > 2)


def by_last_token(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.index_fill(1, (input_ids[0, -1:] + torch.arange(0, VOCAB, 2)) % VOCAB, float("-inf"))


def of_place(batch_id: int, tokens: torch.Tensor) -> Sequence[int]:
    return [i for i in range(VOCAB) if (i + batch_id + int(tokens[-1])) % 3]


CODE: dict[str, Callable[[], dict[str, Any]]] = {
    "paced": lambda: {"logits_processor": Paced()},
    "fading": lambda: {"logits_processor": [Fading()]},
    "function": lambda: {"logits_processor": by_last_token},
    "several": lambda: {
        "logits_processor": LogitsProcessorList([Fading(), hf.NoRepeatNGramLogitsProcessor(2), Paced()])
    },
    "criterion": lambda: {"stopping_criteria": AtSum()},
    "all": lambda: {
        "logits_processor": [Paced(), by_last_token],
        "prefix_allowed_tokens_fn": of_place,
        "stopping_criteria": [AtSum(7), AtSum(11)],
    },
}


def right(names: Sequence[str | None], **more: Any) -> list[list[int]]:
    """What transformers alone says to each prompt."""
    found, model = [], tiny_llama()
    for prompt, name in zip(PROMPTS, names, strict=True):
        own = {} if name is None else CODE[name]()
        for kind in ("logits_processor", "stopping_criteria"):
            own |= {kind: own[kind] if isinstance(own[kind], list) else [own[kind]]} if kind in own else {}
        ids = torch.tensor([prompt])
        config = GenerationConfig(max_new_tokens=NEW, do_sample=False, pad_token_id=0, **more)
        said = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **own)
        found.append(said[0, len(prompt) :].tolist())
    return found


def said(names: Sequence[str | None], drafts: int, graphs: bool, interrupts: Any = (), **options: Any) -> list[Any]:
    engine = engine_with(drafts, graphs, RoundExtra(), **options)
    params = [SamplingParams(NEW, **({} if name is None else CODE[name]())) for name in names]
    return answers(engine, params, interrupts)


def tokens(completions: Sequence[Any]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


MIXED = ["paced", None, "fading", "all", "criterion", "function"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafts", "graphs"),
    [(0, False), (3, True), *(pytest.param(*own, marks=pytest.mark.long) for own in ((3, False), (0, True)))],
)
@pytest.mark.parametrize(
    "names",
    [pytest.param(MIXED, id="mixed"), pytest.param(["several"] * 6, id="several", marks=pytest.mark.long)],
)
@pytest.mark.thorough
def test_tokens_are_transformers(names: list[str | None], drafts: int, graphs: bool, request: Any) -> None:
    if graphs:
        request.getfixturevalue("graphs_on_cpu")
    completions, expected = said(names, drafts, graphs), right(names)
    assert tokens(completions) == expected
    assert expected != right([None] * 6)  # else equal answers say nothing
    reasons = ["stop" if len(own) < NEW else "length" for own in expected]
    assert [completion.finish_reason for completion in completions] == reasons
    if drafts:
        assert any(r.accepted for c, name in zip(completions, names, strict=True) if name for r in c.stats.rounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafts", "graphs"),
    [(3, False), (0, True), *(pytest.param(*own, marks=pytest.mark.long) for own in ((0, False), (3, True)))],
)
@pytest.mark.cases(1)
def test_rows_that_are_opened_again_go_on_with_their_state(drafts: int, graphs: bool, request: Any) -> None:
    """After preemptions, and after interrupts."""
    if graphs:
        request.getfixturevalue("graphs_on_cpu")
    completions = said(MIXED, drafts, graphs, (4, 5, 9), kv_cache_tokens=88, max_num_seqs=6)
    assert tokens(completions) == right(MIXED)
    assert sum(completion.stats.preemptions for completion in completions) > 3


def test_the_place_in_a_call_is_the_batch_id() -> None:
    """As in a batch of transformers, where a prompt's completions follow each other."""
    from fakes import table_head, wrap

    places: list[int] = []

    def noted(batch_id: int, ids: torch.Tensor) -> list[int]:
        places.append(batch_id)
        return [batch_id]

    model = wrap(tiny_llama(), table_head(tiny_llama()), num_speculative_tokens=3)
    params = SamplingParams(4, temperature=1.0, n=2, prefix_allowed_tokens_fn=noted)
    found = model.generate(PROMPTS[:3], params)
    assert tokens(found) == [[i] * 4 for i in range(6)] and set(places) == set(range(6))


def test_options_come_before_a_users_processor_and_temperature_after() -> None:
    seen: list[torch.Tensor] = []

    def noted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores)
        return scores

    engine = engine_with(0, False, RoundExtra())
    answers(engine, [SamplingParams(2, 2.0, top_k=3, suppress_tokens=(5,), logits_processor=noted)] * 6)
    ids = torch.tensor([PROMPTS[0]])
    expected = tiny_llama()(ids).logits[0, -1].index_fill(0, torch.tensor([5]), float("-inf"))
    torch.testing.assert_close(seen[0][0], expected)


@pytest.mark.slow
def test_a_processor_that_cannot_be_copied_has_no_drafts() -> None:
    own = Locked()
    engine = engine_with(3, False, RoundExtra())
    params = [SamplingParams(NEW, logits_processor=own), *(SamplingParams(NEW) for _ in PROMPTS[1:])]
    first, *others = answers(engine, params)
    assert "cannot be copied (TypeError" in first.stats.not_drafted and not any(c.stats.not_drafted for c in others)
    assert not any(r.drafted for r in first.stats.rounds) and any(r.drafted for c in others for r in c.stats.rounds)
    assert tokens([first]) == right(["paced", *[None] * 5])[:1] and own.calls == NEW
    assert NEW <= engine.stats.early_reads <= NEW + 1 < engine.stats.rounds + 2


class Raising(LogitsProcessor):
    def __init__(self, at: Callable[[torch.Tensor], bool]) -> None:
        self.at = at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.at(input_ids[0]):
            raise ValueError("planted")
        return scores


class Banning(Raising):
    """Leaves no token instead."""

    value = float("-inf")

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, self.value) if self.at(input_ids[0]) else scores


class Unknown(Banning):
    value = float("nan")


def failing(engine: Engine, params: Sequence[SamplingParams]) -> tuple[list[Any], list[Any]]:
    ids = [engine.submit(prompt, own) for prompt, own in zip(PROMPTS, params, strict=True)]
    ended: dict[int, Any] = {}
    while engine.has_work:
        ended |= {u.request_id: u for u in engine.step() if u.last}
    return [ended[i].completion for i in ids], [ended[i].error for i in ids]


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.long), 3])
@pytest.mark.thorough
def test_what_a_processor_raises_ends_its_request_alone(drafts: int) -> None:
    own = Raising(lambda ids: len(ids) == len(PROMPTS[1]) + 7)
    params = [SamplingParams(NEW), SamplingParams(NEW, logits_processor=own), *[SamplingParams(NEW)] * 4]
    completions, errors = failing(engine_with(drafts, False, RoundExtra()), params)
    assert isinstance(errors[1], RequestFailedError) and "its logits processor raised ValueError: planted" in str(
        errors[1]
    )
    assert [e for i, e in enumerate(errors) if i != 1] == [None] * 5
    expected = right([None] * 6)
    assert tokens([c for c in completions if c is not None]) == [*expected[:1], *expected[2:]]


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    ("sampled", "kind", "said"),
    [
        pytest.param(sampled, kind, said, marks=[pytest.mark.long] * ((i + j) % 2))
        for i, sampled in enumerate(({}, {"temperature": 1.0, "seed": 3}))
        for j, (kind, said) in enumerate(((Banning, "the largest score is -inf"), (Unknown, "a score is NaN")))
    ],
)
@pytest.mark.cases(1)
def test_scores_that_leave_no_token_end_their_request_alone(
    drafts: int, sampled: dict[str, Any], kind: type[Banning], said: str
) -> None:
    length = len(PROMPTS[1]) + 7
    own = kind(lambda ids: len(ids) == length)
    params = [
        SamplingParams(NEW),
        SamplingParams(NEW, logits_processor=own, **sampled),
        *[SamplingParams(NEW)] * 4,
    ]
    completions, errors = failing(engine_with(drafts, False, RoundExtra()), params)
    assert f"no token can be chosen after {length} tokens: {said}" in str(errors[1])
    assert [e for i, e in enumerate(errors) if i != 1] == [None] * 5
    expected = right([None] * 6)
    assert tokens([c for c in completions if c is not None]) == [*expected[:1], *expected[2:]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"logits_processor": lambda ids, scores: scores.index_fill(1, torch.tensor([9]), float("inf"))},
            "is inf after",
        ),
        ({"logits_processor": lambda ids, scores: torch.full_like(scores, -3e38)}, "is -inf after"),
        ({"prefix_allowed_tokens_fn": lambda i, ids: [5], "suppress_tokens": (5,)}, "is -inf after"),
    ],
)
@pytest.mark.cases(1)
def test_what_all_options_leave_is_divided_by_the_temperature(options: dict[str, Any], said: str) -> None:
    """transformers raises, too: of sampled requests alone are the first two errors."""
    params = [SamplingParams(NEW, temperature=0.7, seed=1, **options), *[SamplingParams(NEW)] * 5]
    _, errors = failing(engine_with(3, False, RoundExtra()), params)
    assert f"the largest score {said} it was divided by the temperature" in str(errors[0]) and errors[1:] == [None] * 5


HOW = {
    "greedy-0": (0, {}),
    "greedy-3": (3, {}),
    "sampled-3": (3, {"temperature": 1.0, "seed": 3}),
    "top_h-3": (3, {"temperature": 1.0, "top_h": 0.5}),
    "eta-3": (3, {"temperature": 1.0, "eta_cutoff": 0.1}),
    "sampled-0": (0, {"temperature": 1.0, "seed": 3}),
    "top_h-0": (0, {"temperature": 1.0, "top_h": 0.5}),
    "eta-0": (0, {"temperature": 1.0, "eta_cutoff": 0.1}),
}
"""Drafts, and how a token is chosen."""
NOTHING_LEFT: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (
        {"allowed_token_ids": [5, 6], "no_repeat_ngram_size": 2},
        ("greedy-0", "greedy-3", "sampled-3", "top_h-3", "eta-3"),
    ),
    ({"allowed_token_ids": [5, 6], "stop_token_ids": (5, 6), "min_new_tokens": 9}, ("greedy-3", "eta-3")),
    ({"forced_eos_token_id": 7, "suppress_tokens": [7], "max_new_tokens": 4}, ("greedy-3", "sampled-3")),
    ({"suppress_tokens": [i for i in range(VOCAB) if i not in (5, 6)], "no_repeat_ngram_size": 2}, ()),
    ({"logit_bias": {i: float("-inf") for i in range(VOCAB)}}, ()),
]
"""Options, and how `make test` chooses tokens with them: each way with some of them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "drafts", "sampled"),
    [
        pytest.param(options, *HOW[how], id=f"{i}-{how}", marks=[pytest.mark.long] * (how not in usual))
        for i, (options, usual) in enumerate(NOTHING_LEFT)
        for how in HOW
    ],
)
@pytest.mark.cases(1)
def test_options_that_leave_no_token_end_their_request_alone(
    options: dict[str, Any], sampled: dict[str, Any], drafts: int
) -> None:
    """Greedy requests went on with token 0, sampled ones with any; two filters' classes raised, for the whole round."""
    plain = SamplingParams(NEW)
    completions, errors = failing(
        engine_with(drafts, False, RoundExtra()), [plain, SamplingParams(**options, **sampled), *[plain] * 4]
    )
    assert "because its options raised ValueError: no token can be chosen after " in str(errors[1])
    assert errors[:1] + errors[2:] == [None] * 5
    expected = right([None] * 6)
    assert tokens([c for c in completions if c is not None]) == [*expected[:1], *expected[2:]]


@pytest.mark.parametrize("drafts", [0, 3])
def test_scores_that_a_processor_left_when_it_raised_hurt_nobody(drafts: int) -> None:
    """NaN has no distribution to draw from."""

    def spoil(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > len(PROMPTS[1]):
            scores.fill_(float("nan"))
            raise ValueError("spoilt")
        return scores

    plain = SamplingParams(NEW, temperature=1.0, seed=3)
    spoilt = SamplingParams(NEW, temperature=1.0, seed=3, logits_processor=spoil)
    engine = engine_with(drafts, False, RoundExtra())
    expected, _ = failing(engine, [plain] * 6)
    found, errors = failing(engine, [plain, spoilt, *[plain] * 4])
    assert "spoilt" in str(errors[1])
    assert [one.token_ids for one in found[2:]] == [one.token_ids for one in expected[2:]]


def test_each_request_has_a_watch_of_its_own_where_options_leave_few_tokens() -> None:
    some = SamplingParams(allowed_token_ids=[5, 6, 7], no_repeat_ngram_size=9, max_new_tokens=5)
    first, second = (some.of_request(i, torch.device("cpu")) for i in range(2))
    assert first.watch is not None and first.watch is not second.watch
    for other in (SamplingParams(suppress_tokens=[5]), SamplingParams(logit_bias={5: float("-inf")})):
        assert other.watch is not None
    for plain in (
        SamplingParams(allowed_token_ids=[5]),
        SamplingParams(repetition_penalty=1.2, min_new_tokens=3, logit_bias={5: -100.0}),
    ):
        assert plain.watch is None and plain.of_request(0, torch.device("cpu")) is plain
    ended: list[Any] = answers(engine_with(3, False, RoundExtra()), [some] * 6)
    assert all(len(one.token_ids) == 5 and set(one.token_ids) <= {5, 6, 7} for one in ended)


def test_what_the_last_processor_returns_is_rounded_to_float32() -> None:
    seen, tiny = list[torch.dtype](), 2.0**-40
    wide = [lambda ids, scores: scores.double() + 1 + tiny, lambda ids, scores: seen.append(scores.dtype) or scores]
    scores = torch.zeros(1, VOCAB)
    RequestProcessors(wide).apply(torch.zeros(1, 3, dtype=torch.int64), [3], scores)  # type: ignore[arg-type]
    assert seen == [torch.float64] and torch.equal(scores, torch.ones(1, VOCAB))


def test_empty_lists_are_none() -> None:
    assert SamplingParams(logits_processor=[], stopping_criteria=[]) == SamplingParams()


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.long), 3])
def test_what_later_options_repair_is_no_error(drafts: int) -> None:
    """The only token that the function allows may not end the request yet, and is then forced to end it."""
    length = len(PROMPTS[0]) + 3
    options: dict[str, Any] = {
        "stop_token_ids": (7,), "min_new_tokens": NEW, "forced_eos_token_id": 7, "max_new_tokens": 4,
        "prefix_allowed_tokens_fn": lambda i, ids: [7] if len(ids) == length else list(range(VOCAB)),
    }  # fmt: skip
    completions, errors = failing(
        engine_with(drafts, False, RoundExtra()), [SamplingParams(**options), *[SamplingParams(NEW)] * 5]
    )
    assert errors == [None] * 6 and completions[0].token_ids[3:] == [7]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [torch.Tensor.to_sparse, lambda scores: scores.to("meta")])
@pytest.mark.cases(1)
def test_a_tensor_that_cannot_be_copied_ends_its_request_alone(wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    params = [SamplingParams(NEW, logits_processor=lambda ids, scores: wrong(scores)), *[SamplingParams(NEW)] * 5]
    _, errors = failing(engine_with(3, False, RoundExtra()), params)
    assert "its logits processor raised" in str(errors[0]) and errors[1:] == [None] * 5


def test_the_error_says_which_it_was_and_has_the_others() -> None:
    """Of generate, in a list and on an event loop, and of a stream."""
    target = tiny_llama()
    own = Raising(lambda ids: len(ids) == len(PROMPTS[1]) + 2)
    params = [SamplingParams(4), SamplingParams(4, logits_processor=own), SamplingParams(4)]
    with wrap(target, None) as model:
        right = [one.token_ids for one in model.generate(PROMPTS[:3], SamplingParams(4))]
        for call in (
            lambda: model.generate(PROMPTS[:3], params),
            lambda: model.stream(PROMPTS[:3], params).completions(),
            lambda: asyncio.run(model.generate_async(PROMPTS[:3], params)),
        ):
            with pytest.raises(RequestFailedError, match="planted") as caught:
                call()
            assert caught.value.index == 1
            found = {place: one.token_ids for place, one in caught.value.completions.items()}
            assert found == {0: right[0], 2: right[2]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Raising, Banning])
@pytest.mark.cases(1)
def test_what_is_raised_after_rejected_drafts_ends_nothing(kind: type[Raising]) -> None:
    """A processor may reject what transformers would never have given it."""
    expected = right([None] * 6)
    whole = [[*prompt, *own] for prompt, own in zip(PROMPTS, expected, strict=True)]
    strange: list[int] = []

    def never_said(ids: torch.Tensor) -> bool:
        odd = not any(ids.tolist() == own[: len(ids)] for own in whole)
        strange.append(odd)
        return odd

    params = [SamplingParams(NEW, logits_processor=kind(never_said)) for _ in PROMPTS]
    completions, errors = failing(engine_with(3, False, RoundExtra()), params)
    assert errors == [None] * 6 and tokens(completions) == expected and any(strange)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [lambda ids, scores: None, lambda ids, scores: scores[:, :-1], lambda ids: ids],
    ids=["none", "shape", "args"],
)
@pytest.mark.cases(1)
def test_a_wrong_result_is_named(wrong: Any) -> None:
    params = [SamplingParams(NEW, logits_processor=wrong), *[SamplingParams(NEW)] * 5]
    _, errors = failing(engine_with(3, False, RoundExtra()), params)
    assert "its logits processor raised TypeError" in str(errors[0]) and errors[1:] == [None] * 5


@pytest.mark.slow
def test_a_criterion_that_raises_ends_its_request_alone() -> None:
    def bad(ids: torch.Tensor, scores: Any) -> bool:
        raise KeyError("planted")

    params = [SamplingParams(NEW, stopping_criteria=bad), *[SamplingParams(NEW)] * 5]
    _, errors = failing(engine_with(3, False, RoundExtra()), params)
    assert "a stopping criterion raised KeyError" in str(errors[0]) and errors[1:] == [None] * 5


@pytest.mark.slow
def test_what_a_criterion_raises_once_is_its_requests() -> None:
    """Not that of whoever leads the round; nor is it asked again."""
    calls: list[int] = []

    def bad(ids: torch.Tensor, scores: Any) -> bool:
        calls.append(ids.shape[1])
        if len(calls) == 5:
            raise KeyError("planted")
        return False

    params = [SamplingParams(NEW, stopping_criteria=bad), *[SamplingParams(NEW)] * 5]
    _, errors = failing(engine_with(3, False, RoundExtra()), params)
    assert "a stopping criterion raised KeyError" in str(errors[0]) and errors[1:] == [None] * 5 and len(calls) == 5


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.long), 3])
def test_what_is_raised_behind_an_end_ends_nothing(drafts: int) -> None:
    """A grammar that is over may raise; the token that ended its request came before."""
    expected = right([None] * 6)
    ends = [own[6] for own in expected]
    lengths = [len(prompt) + own.index(end) + 1 for prompt, own, end in zip(PROMPTS, expected, ends, strict=True)]
    params = [
        SamplingParams(NEW, stop_token_ids=(end,), logits_processor=Raising(lambda ids, n=n: len(ids) >= n))  # type: ignore[misc]
        for end, n in zip(ends, lengths, strict=True)
    ]
    completions, errors = failing(engine_with(drafts, False, RoundExtra()), params)
    assert errors == [None] * 6 and all(c.finish_reason == "stop" for c in completions)


@pytest.mark.slow
def test_a_prefix_function_comes_before_forced_tokens() -> None:
    """As in transformers: what is forced is forced, whatever the function allows."""
    options = {"forced_eos_token_id": (7,), "prefix_allowed_tokens_fn": lambda batch_id, ids: [1, 2, 9, 30]}
    found = answers(engine_with(3, False, RoundExtra()), [SamplingParams(NEW, **options)] * 6)
    assert all(completion.token_ids[-1] == 7 for completion in found)
    model, ids = tiny_llama(), torch.tensor([PROMPTS[1]])
    said = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options
    )
    assert found[1].token_ids == said[0, len(PROMPTS[1]) :].tolist()


class Counting:
    """A prefix function with a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch_id: int, ids: torch.Tensor) -> list[int]:
        self.calls += 1
        return [i for i in range(VOCAB) if (i + self.calls) % 3]


@pytest.mark.slow
@pytest.mark.thorough
def test_an_object_as_prefix_function_is_copied() -> None:
    own = Counting()
    drafted, plain = (
        tokens(answers(engine_with(k, False, RoundExtra()), [SamplingParams(NEW, prefix_allowed_tokens_fn=own)] * 6))
        for k in (3, 0)
    )
    assert drafted == plain and own.calls == 0


@pytest.mark.slow
def test_the_text_does_not_depend_on_drafts_where_a_criterion_is_met_inside_a_stop_string() -> None:
    texts = ["".join(c.text) for c in answers(engine_with(0, False, RoundExtra()), [SamplingParams(NEW)] * 6)]
    stops = [(text[3:6],) for text in texts]

    def said_with(drafts: int) -> list[tuple[str, list[int]]]:
        lengths = [len(prompt) + 5 for prompt in PROMPTS]
        params = [
            SamplingParams(NEW, stop=stop, stopping_criteria=lambda ids, scores, n=n: ids.shape[1] >= n)
            for stop, n in zip(stops, lengths, strict=True)
        ]
        return [(c.text, c.token_ids) for c in answers(engine_with(drafts, False, RoundExtra()), params)]

    assert said_with(3) == said_with(0)


class Eighth(StoppingCriteria):
    """Stops at its eighth call: a token that is shown twice ends a request early."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        self.calls += 1
        return self.calls >= 8


@pytest.mark.slow
def test_criteria_see_every_token_once_after_interrupts() -> None:
    own = [SamplingParams(NEW, stopping_criteria=Eighth())] * 6
    found = answers(engine_with(3, False, RoundExtra(), kv_cache_tokens=88, max_num_seqs=6), own, (2, 3, 4))
    assert [len(completion.token_ids) for completion in found] == [8] * 6


class Late(Paced):
    """It cannot be copied after its first call."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.lock = threading.Lock()
        return super().__call__(input_ids, scores)


@pytest.mark.slow
def test_a_state_that_can_no_longer_be_copied_is_named() -> None:
    params = [SamplingParams(NEW, logits_processor=Late()), *[SamplingParams(NEW)] * 5]
    _, errors = failing(engine_with(3, False, RoundExtra()), params)
    assert "it can no longer be copied" in str(errors[0]) and "__deepcopy__" in str(errors[0])
    assert errors[1:] == [None] * 5


@pytest.mark.slow
@pytest.mark.thorough
def test_gradients_may_be_taken_in_a_processor() -> None:
    def guided(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            own = scores.detach().clone().requires_grad_()
            own.softmax(1)[:, :9].sum().log().backward()
        assert own.grad is not None
        return scores + 5 * own.grad

    found = tokens(answers(engine_with(3, False, RoundExtra()), [SamplingParams(NEW, logits_processor=guided)] * 6))
    assert found == tokens(
        answers(engine_with(0, False, RoundExtra()), [SamplingParams(NEW, logits_processor=guided)] * 6)
    )


@pytest.mark.slow
@pytest.mark.thorough
def test_no_copies_are_kept_of_requests_that_are_gone() -> None:
    import gc
    import weakref

    alive: list[Any] = []

    class Seen(Paced):
        def __deepcopy__(self, memo: Any) -> Seen:
            own = Seen()
            own.calls = self.calls
            alive.append(weakref.ref(own))
            return own

    engine = engine_with(3, False, RoundExtra())
    answers(engine, [SamplingParams(NEW, logits_processor=Seen())] * 6)
    answers(engine, [SamplingParams(NEW)] * 6)
    gc.collect()
    assert alive and not any(ref() is not None for ref in alive)


def _bonus_token_alone(own: RequestProcessors, ids: torch.Tensor, lens: Sequence[int], scores: torch.Tensor) -> None:
    """Drafts are not among the tokens that a processor sees."""
    ids = ids.clone()
    ids[:, lens[0] :] = ids[:, lens[0] - 1 : lens[0]]
    APPLY(own, ids, lens, scores)


APPLY = RequestProcessors.apply
NO_COPIES = SimpleNamespace(deepcopy=lambda one: one)
"""Rejected drafts advance a state, too."""
DEFECTS: dict[str, tuple[str, tuple[Any, str, Any]]] = {
    "not copied": ("paced", (user_code, "copy", NO_COPIES)),
    "drafted prefix not seen": ("function", (RequestProcessors, "apply", _bonus_token_alone)),
}


@pytest.mark.long
@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.long)])
def test_planted_defects_are_seen(defect: str, graphs: bool, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    if graphs:
        request.getfixturevalue("graphs_on_cpu")
    name, planted = DEFECTS[defect]
    monkeypatch.setattr(*planted)
    assert tokens(said([name] * 6, 3, graphs)) != right([name] * 6)


def test_a_users_own_object_is_not_changed() -> None:
    own, criterion = Paced(), AtSum()
    params = [SamplingParams(NEW, logits_processor=own, stopping_criteria=criterion)] * 6
    answers(engine_with(3, False, RoundExtra()), params)
    assert own.calls == criterion.calls == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"logits_processor": 3}, "logits_processor=3: allowed is a callable"),
        ({"logits_processor": [Paced]}, "allowed is a callable"),
        ({"stopping_criteria": "stop"}, "stopping_criteria='stop'"),
        ({"prefix_allowed_tokens_fn": [1]}, "allowed is a function"),
        ({"max_time": -1}, "max_time=-1"),
        ({"max_time": float("nan")}, "max_time=nan"),
        (
            {"logits_processor": hf.RepetitionPenaltyLogitsProcessor(1.2), "repetition_penalty": 1.5},
            "RepetitionPenaltyLogitsProcessor and repetition_penalty=1.5",
        ),
    ],
)
def test_bad_values_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        SamplingParams(**given)


@pytest.mark.slow
def test_pure_processors_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, engine = list[Any](), engine_with(3, False, RoundExtra())
    monkeypatch.setattr(user_code, "copy", SimpleNamespace(deepcopy=lambda one: copies.append(one) or one))
    params = SamplingParams(NEW, logits_processor=[by_last_token, hf.NoRepeatNGramLogitsProcessor(2)])
    answers(engine, [params] * 6)
    assert not copies


def test_code_does_not_move_to_another_engine() -> None:
    engine = engine_with(3, False, RoundExtra())
    request = Leaving(PROMPTS[0], SamplingParams(stopping_criteria=AtSum()), 0, (), 1.0)
    with pytest.raises(HandoffMismatchError, match="stopping_criteria: code of the caller's"):
        moving_requests(engine).check_leaving(request)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.long), 3])
def test_a_request_ends_when_its_time_is_over(drafts: int) -> None:
    """Running or waiting, with what was reported; others go on."""
    engine = engine_with(drafts, False, RoundExtra(), max_num_seqs=2)
    late = SamplingParams(200, max_time=0.0)
    ids = [engine.submit(PROMPTS[0], SamplingParams(NEW)), *(engine.submit(p, late) for p in PROMPTS[1:4])]
    ended: dict[int, Any] = {}
    shown: dict[int, list[int]] = {i: [] for i in ids}
    rounds = 0
    while engine.has_work:
        rounds += 1
        updates = engine.step()
        for update in updates:
            shown[update.request_id] += update.token_ids
        ended |= {u.request_id: u.completion for u in updates if u.last}
        assert rounds > 3 or ended.keys() >= set(ids[1:])
    assert all(shown[i] == ended[i].token_ids for i in ids)
    assert all(0 <= done.stats.queue_s < 100 and 0 <= done.stats.prefill_s < 100 for done in ended.values())
    assert [ended[i].finish_reason for i in ids] == ["length", *["timeout"] * 3]
    assert ended[ids[0]].token_ids == right([None] * 6)[0]
    assert engine.usage().requests == 0


@pytest.mark.slow
def test_time_is_counted_from_the_submission() -> None:
    engine = engine_with(0, False, RoundExtra())
    own = engine.submit(PROMPTS[0], SamplingParams(100, max_time=0.4))
    begin, last = time.perf_counter(), None
    while engine.has_work:
        time.sleep(0.05)
        last = [u for u in engine.step() if u.request_id == own][-1]
    assert last is not None and last.completion.finish_reason == "timeout"
    assert 0.4 <= time.perf_counter() - begin < 5 and 0 < len(last.completion.token_ids) < 100


def test_other_ranks_look_at_no_clock() -> None:
    params = SamplingParams(max_time=3.0, stop=("a",), stop_token_ids=(4,))
    assert params.for_other_ranks == SamplingParams(stop_token_ids=(4,))


def test_infinity_is_no_limit() -> None:
    engine = engine_with(0, False, RoundExtra())
    assert [c.finish_reason for c in answers(engine, [SamplingParams(4, max_time=float("inf"))] * 6)] == ["length"] * 6
