"""A toy extra in every pipeline, without an edit to the rounds: plain, drafted and chained rounds, operator by operator
and from emulated graphs, with preemptions and interrupts. Its tokens against transformers' with a logits processor."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fakes import VOCAB, backend_of_ours, count_calls, random_prompts, table_head, tiny_llama, wrap
from transformers import LogitsProcessorList

from attention.batch.metadata import ExtraSection
from specdec.acceptance.accept import SampledInputs, accept_sampled
from specdec.engine.engine import Engine
from specdec.errors import HandoffMismatchError
from specdec.execution.ragged import RaggedTarget
from specdec.extensions.handoff.moved import Leaving
from specdec.extensions.handoff.moving import moving_requests
from specdec.requests.sampling import SamplingArrays, SamplingParams, SamplingTensors
from specdec.requests.target_probs import target_probs
from specdec.rounds.extras import RoundExtra, drafted_prefixes
from specdec.rounds.fixed import FixedTarget
from specdec.rounds.randomness import SamplingRound, request_key
from tests.specdec.execution.test_graphs import FixedPlaceBackend, graphs_on_cpu, recorded_on_cpu  # noqa: F401
from tests.specdec.rounds.toy_extra import SumColumns, Sums, ToyBias, ToyProcessor, favoured, with_extra

PROMPTS = random_prompts((5, 33, 1, 17, 60, 9))
NEW, STRENGTH = 20, 2.5


@functools.cache
def oracle(prompt: tuple[int, ...], strength: float = STRENGTH) -> list[int]:
    """Greedy tokens of transformers alone."""
    ids = torch.tensor([prompt])
    processors = LogitsProcessorList([ToyProcessor(strength)])
    said = tiny_llama().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, logits_processor=processors
    )
    return list(said[0, len(prompt) :].tolist())


def engine_with(drafts: int, graphs: bool, extra: RoundExtra | None = None, **options: Any) -> Engine:
    target = tiny_llama()
    head = table_head(target) if drafts else None
    with backend_of_ours(FixedPlaceBackend(torch.device("cpu"))):
        wrapped = wrap(target, head, num_speculative_tokens=drafts, cuda_graphs=False, **options)
    engine = with_extra(wrapped, extra or ToyBias(STRENGTH), graphs)
    engine.use(engine.executor, queue_verification=graphs)
    return engine


def answers(engine: Engine, params: Sequence[SamplingParams], interrupts: Sequence[int] = ()) -> list[Any]:
    """The completions of all prompts; rounds of these numbers are interrupted as they verify."""
    ids = [engine.submit(prompt, own) for prompt, own in zip(PROMPTS, params, strict=True)]
    found: dict[int, Any] = {}
    verify, rounds = engine.executor.verify, 0

    def counted(*args: Any) -> Any:
        nonlocal rounds
        rounds += 1
        if rounds in interrupts:
            raise KeyboardInterrupt
        return verify(*args)

    engine.executor.verify = counted  # type: ignore[method-assign]
    while engine.has_work:
        try:
            updates = engine.step()
        except KeyboardInterrupt:
            continue
        found |= {update.request_id: update.completion for update in updates if update.completion is not None}
    assert rounds > max(interrupts, default=0)
    return [found[i] for i in ids]


GREEDY = [SamplingParams(max_new_tokens=NEW)] * len(PROMPTS)


def right() -> list[list[int]]:
    return [oracle(tuple(prompt)) for prompt in PROMPTS]


@pytest.mark.thorough
def test_the_bias_decides_some_tokens_and_not_all() -> None:
    plain, biased = [oracle(tuple(p), 0.0) for p in PROMPTS], right()
    assert all(a != b for a, b in zip(plain, biased, strict=True))
    taken = []
    for prompt, said in zip(PROMPTS, biased, strict=True):
        totals = np.cumsum([sum(prompt), *said[:-1]])
        taken += (favoured(totals, VOCAB) == said).tolist()
    assert 0.1 < np.mean(taken) < 0.9


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.cases(1)
def test_tokens_are_those_of_a_logits_processor(drafts: int) -> None:
    """Operator by operator: plain rounds and drafted ones, prompts in chunks beside them."""
    completions = answers(engine_with(drafts, False), GREEDY)
    assert [c.token_ids for c in completions] == right()
    if drafts:
        assert np.mean([r.accepted / r.drafted for c in completions for r in c.stats.rounds if r.drafted]) > 0.1


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.cases(1)
def test_tokens_from_graphs_are_too(
    drafts: int,
    graphs_on_cpu: list[Any],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In rounds of any shape, in those of fixed shape, and in those launched before the commit or before the read."""
    ragged, fixed = count_calls(monkeypatch, RaggedTarget, "logits"), count_calls(monkeypatch, FixedTarget, "send")
    launched: list[bool] = []
    plain = SumColumns.after

    def after(self: Any, *args: Any) -> Any:
        launched.append(args[-1] is not None)
        return plain(self, *args)

    monkeypatch.setattr(SumColumns, "after", after)
    assert [c.token_ids for c in answers(engine_with(drafts, True), GREEDY)] == right()
    assert ragged and fixed and launched and all(read == bool(drafts) for read in launched)


@pytest.mark.parametrize(
    ("drafts", "graphs"),
    [
        (3, False),
        pytest.param(0, True, marks=pytest.mark.slow),
        *(pytest.param(*own, marks=pytest.mark.long) for own in ((0, False), (3, True))),
    ],
)
@pytest.mark.cases(1)
def test_rows_that_are_opened_again_keep_their_bias(drafts: int, graphs: bool, request: Any) -> None:
    """After preemptions, and after interrupts: columns follow from the tokens."""
    if graphs:
        request.getfixturevalue("graphs_on_cpu")
    engine = engine_with(drafts, graphs, kv_cache_tokens=88, max_num_seqs=6)
    completions = answers(engine, GREEDY, interrupts=(4, 9))
    assert [c.token_ids for c in completions] == right()
    assert engine.stats.preemptions > 0 and engine.stats.interrupted > 6, "for want of pages, and of interrupts"


def sampled_oracle(prompt: list[int], completion: Any, params: SamplingParams) -> list[int]:
    """What each round of a request decides by speculative sampling over the model's own logits and the bias."""
    model, processor, said = tiny_llama(), ToyProcessor(STRENGTH), list(prompt)
    own, key = SamplingArrays.of([params]), np.array([request_key(params.seed or 0, 0)], np.uint64)
    rounds = [(), *completion.drafts]
    for drafts in rounds:
        n = len(drafts)
        ids = torch.tensor([[*said, *drafts]])
        logits = model(ids, use_cache=False).logits[0, len(said) - 1 :]
        rows = [processor(ids[:, : len(said) + i], logits[i : i + 1]) for i in range(n + 1)]
        tensors = SamplingTensors(*(torch.from_numpy(x).expand(n + 1) for x in vars(own).values()), filters=own.filters)
        p = target_probs(torch.cat(rows), tensors)[None]
        uniforms = SamplingRound(own, key, np.array([len(said)]), 1, 1, n)
        accept, following = uniforms.accept_uniforms(n), uniforms.next_uniforms(n + 1)
        inputs = SampledInputs(p, None, torch.from_numpy(accept), torch.from_numpy(following))
        result = accept_sampled(torch.tensor([drafts], dtype=torch.int64).reshape(1, n), torch.tensor([n]), inputs)
        said += [*drafts[: int(result.num_accepted[0])], int(result.next_token[0])]
    return said[len(prompt) :][:NEW]


@pytest.mark.parametrize(
    ("drafts", "graphs"),
    [
        (3, False),
        pytest.param(0, True, marks=pytest.mark.slow),
        *(pytest.param(*own, marks=pytest.mark.long) for own in ((0, False), (3, True))),
    ],
)
@torch.no_grad()
@pytest.mark.cases(1)
def test_sampled_tokens_are_decided_by_the_biased_distribution(drafts: int, graphs: bool, request: Any) -> None:
    if graphs:
        request.getfixturevalue("graphs_on_cpu")
    settings: list[dict[str, Any]] = [{"temperature": 0.9}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.2}]
    params = [SamplingParams(NEW, seed=i, return_drafts=True, **settings[i % 3]) for i in range(len(PROMPTS))]
    engine = engine_with(drafts, graphs, draft_sampling="greedy")
    for prompt, own, completion in zip(PROMPTS, params, answers(engine, params), strict=True):
        assert completion.token_ids == sampled_oracle(prompt, completion, own)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.cases(1)
def test_a_step_that_ignores_the_drafted_prefix_is_seen(graphs: bool, request: Any) -> None:
    if graphs:
        request.getfixturevalue("graphs_on_cpu")
    planted = ToyBias(STRENGTH, ignores_drafts=True)
    assert [c.token_ids for c in answers(engine_with(3, graphs, planted), GREEDY)] != right()


@dataclass(frozen=True)
class Fixed(ToyBias):
    refuses_handoff: ClassVar[str] = "the toy stays where it is"


def test_an_extra_that_cannot_move_refuses_handoffs() -> None:
    engine = engine_with(0, False, Fixed(STRENGTH))
    assert engine.admission.check(PROMPTS[0], GREEDY[0])
    with pytest.raises(HandoffMismatchError, match="do not move between engines: the toy stays"):
        moving_requests(engine).check_leaving(Leaving(PROMPTS[0], GREEDY[0], 0, (), 1.0))


def test_what_stands_before_each_row_of_logits() -> None:
    """Of a ragged round: a row that verifies 2 of n = 2 drafts, one that verifies 1, and one that ends its prompt."""
    ids = torch.tensor([10, 11, 12, 20, 21, 7, 8, 9])
    index = torch.tensor([[0, 1, 2], [3, 4, 4], [5, 5, 5]])
    rows = torch.tensor([0, 1, 2, 3, 4, 7])
    round_: Any = SimpleNamespace(token_ids=ids, logits_indices=rows, logit_index=index)
    found = drafted_prefixes(round_)
    assert found.owner.tolist() == [0, 0, 0, 1, 1, 2]
    before = [own[there].tolist() for own, there in zip(found.token_ids, found.there, strict=True)]
    assert before == [[10], [10, 11], [10, 11, 12], [20], [20, 21], [9]]


def test_rows_added_to_a_fixed_shape_have_nothing_of_an_earlier_round() -> None:
    section = ExtraSection(Sums, "toy", "target", {"rows": "target.rows"})
    place = section.buffers({"target.toy.base": np.full(4, 9)})
    section.write(place, (None, Sums(np.array([5, 6]))))
    assert place.base.tolist() == [5, 6, 0, 0]
    section.write(place, (None,))
    assert place.base.tolist() == [0, 0, 0, 0]
