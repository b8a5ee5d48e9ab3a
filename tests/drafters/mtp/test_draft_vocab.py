"""Modules that draft on some tokens of the target: the rows they read; their drafts are the oracle's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import VOCAB, free_everywhere, launch_ahead, table_head, wrap

from attention.errors import InvalidInputError
from drafters.base import DraftsOnSome
from drafters.loops import chain
from drafters.mtp.convention_check import compare_conventions
from drafters.mtp.head import MtpHead
from tests.drafters.loops.test_modules_engine import make as make_modules  # noqa: F401
from tests.drafters.loops.test_modules_engine import rounds as module_rounds
from tests.drafters.test_conformance import GREEDY, PROMPTS, greedy_by_hand, make, oracle_rounds  # noqa: F401
from tests.drafters.test_sampled_drafts import PARAMS, SIZES, TIGHT, check_execution, execution  # noqa: F401
from tests.sampled_rounds import drawn_as

SOME = torch.tensor([token for token in range(VOCAB) if token % 3])
Make = Callable[..., Any]


def test_it_reads_copies_of_some_rows(make: Make) -> None:  # noqa: F811
    _, head = make("mimo")
    x, state = torch.randn(5, 32), set(head.state_dict())
    whole = head.logits(x)
    assert head.draft_rows is None and head.to_target_ids(SOME) is SOME
    head.draft_on(SOME.int())
    assert torch.equal(head.logits(x), head.whole_logits(x)[:, SOME]) and torch.equal(head.whole_logits(x), whole)
    assert head.to_target_ids(torch.tensor([[0, 1], [2, 3]])).tolist() == [[1, 2], [4, 5]]
    assert head.draft_vocab_size == len(SOME) and head.draft_rows.dtype == head.target_lm_head.dtype
    assert set(head.state_dict()) == state, "the map is no part of the head's checkpoint"
    assert isinstance(head, DraftsOnSome) and not isinstance(table_head(make("table")[0]), DraftsOnSome)


def test_copies_are_renewed_in_their_place(make: Make) -> None:  # noqa: F811
    _, head = make("mimo")
    with torch.inference_mode():
        head.draft_on(SOME)
    place, x = head.draft_rows.data_ptr(), torch.randn(5, 32)
    head.target_lm_head.mul_(2)
    assert not torch.equal(head.logits(x), head.whole_logits(x)[:, SOME])
    head.renew_draft_rows(head.target_lm_head)
    assert torch.equal(head.logits(x), head.whole_logits(x)[:, SOME]) and head.draft_rows.data_ptr() == place


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.tensor([3, 2]), "strictly increasing"),
        (torch.tensor([2, 2]), "strictly increasing"),
        (torch.tensor([1, VOCAB]), f"allowed are 0 to {VOCAB - 1}"),
        (torch.tensor([-1, 2]), f"allowed are 0 to {VOCAB - 1}"),
        (torch.tensor([], dtype=torch.int64), "non-empty"),
    ],
)
def test_ids_that_are_no_map_change_nothing(ids: torch.Tensor, words: str, make: Make) -> None:  # noqa: F811
    _, head = make("mimo")
    with pytest.raises(InvalidInputError, match=words):
        head.draft_on(ids)
    assert head.draft_rows is None and head.draft_vocab_size == VOCAB


def test_the_convention_is_judged_on_the_whole_vocabulary(make: Make) -> None:  # noqa: F811
    model, head = make("deepseek_v3")
    ids = torch.arange(40) % VOCAB
    with torch.no_grad():
        states = model.get_decoder()(ids[None], use_cache=False).last_hidden_state[0]
    found = compare_conventions(head.mtp_modules, ids, states, 3)
    head.draft_on(SOME[:9])
    assert len(found) == 2 and compare_conventions(head.mtp_modules, ids, states, 3) == found


@pytest.mark.parametrize("name", ["mimo", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
@torch.inference_mode()
@pytest.mark.cases(1)
def test_drafts_equal_the_oracles(name: str, make: Make) -> None:  # noqa: F811
    model, head = make(name)
    head.draft_on(SOME)
    wrapped = wrap(model, head, num_speculative_tokens=3, max_num_batched_tokens=12)
    completions = wrapped.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in completions] == [greedy_by_hand(model, p, 20) for p in PROMPTS]
    compared = [r for p, c in zip(PROMPTS, completions, strict=True) for r in oracle_rounds(model, head, p, c)]
    assert len(compared) > 60 and [ours for ours, _ in compared] == [oracle for _, oracle in compared]
    assert {draft for ours, _ in compared for draft in ours} <= set(SOME.tolist())
    accepted = [r.accepted for c in completions for r in c.stats.rounds]
    assert 0 in accepted and max(accepted) >= 1 and free_everywhere(wrapped)


def compared_of(wrapped: Any) -> list[tuple[list[int], list[int]]]:
    """(drafts, the oracle's) of every round of sampled and greedy requests."""
    completions = wrapped.generate(PROMPTS, PARAMS)
    with torch.inference_mode():
        every = list(zip(PROMPTS, completions, PARAMS, strict=True))
        if isinstance(wrapped.head, MtpHead):
            model, head = wrapped.hf_model, wrapped.head
            return [r for p, c, own in every for r in oracle_rounds(model, head, p, c, drawn_as(own))]
        return [r for p, c, own in every for r in module_rounds(wrapped, p, c, drawn_as(own))]


@pytest.mark.slow
@pytest.mark.thorough
def test_drawn_drafts_of_one_module_are_the_oracles(execution: dict[str, Any], make: Make) -> None:  # noqa: F811
    model, head = make("mimo")
    head.draft_on(SOME)
    wrapped = wrap(model, head, **SIZES, **execution, **TIGHT)
    launch_ahead(wrapped, bool(execution))
    check_execution(wrapped, execution)
    compared = compared_of(wrapped)
    assert len(compared) > 40 and [ours for ours, _ in compared] == [oracle for _, oracle in compared]


def several(make_modules: Make, **options: Any) -> Any:  # noqa: F811
    """Two modules that share one copy of some rows."""
    wrapped = make_modules("mimo", 2, **SIZES, **options, draft_vocab=SOME)
    first, second = wrapped.head.mtp_modules
    assert first.draft_rows is second.draft_rows is wrapped.head.draft_rows
    assert wrapped.head.draft_vocab_size == len(SOME) == len(wrapped.head.draft_rows)
    launch_ahead(wrapped, "cuda_graphs" in options)
    return wrapped


@pytest.mark.slow
@pytest.mark.thorough
def test_drawn_drafts_of_several_modules_are_the_oracles(
    execution: dict[str, Any],  # noqa: F811
    make_modules: Make,  # noqa: F811
) -> None:
    wrapped = several(make_modules, **execution, **TIGHT)
    check_execution(wrapped, execution)
    compared = compared_of(wrapped)
    assert len(compared) > 40 and [ours for ours, _ in compared] == [oracle for _, oracle in compared]
    assert {draft for ours, _ in compared for draft in ours} <= set(SOME.tolist())


@pytest.mark.long
def test_a_draft_id_taken_for_a_target_id_is_seen(make_modules: Make, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Planted: the loop of several modules does not map the drafts after the first."""
    wrapped = several(make_modules)
    assert all(ours == oracle for ours, oracle in compared_of(wrapped))
    plain = chain.run_steps

    def unmapped(*given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MtpHead, "to_target_ids", lambda self, ids: ids)
            return plain(*given)

    monkeypatch.setattr(chain, "run_steps", unmapped)
    assert any(ours != oracle for ours, oracle in compared_of(wrapped))
