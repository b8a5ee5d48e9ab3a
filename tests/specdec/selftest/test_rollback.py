"""What is planted in a recurrence or in its index arithmetic is found: at load, or by the tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import random_prompts, wrap

from attention.recurrence import functions as reference
from attention.recurrence.functions import REFERENCE, Recurrences
from attention.recurrence.state_rows import StateRows
from specdec import SamplingParams
from specdec.errors import RoundFailedError, UnsupportedModelError
from specdec.selftest.selftest import self_test
from tests.hybrids import RecallHead, greedy_text, tiny_hybrid

PROMPTS = random_prompts([17, 3, 9])


def no_replay(rows: StateRows) -> StateRows:
    return replace(rows, start=rows.start - rows.replay, replay=torch.zeros_like(rows.replay))


def one_short(rows: StateRows) -> StateRows:
    fewer = (rows.replay - 1).clamp_min(0)
    return replace(rows, start=rows.start - rows.replay + fewer, replay=fewer)


def drafts_folded_in(rows: StateRows) -> StateRows:
    lens = rows.query_start_loc[1:] - rows.query_start_loc[:-1]
    return replace(rows, num_new=lens)


def wrong_slot(rows: StateRows) -> StateRows:
    return rows if int((rows.start == 0).any()) else replace(rows, slots=rows.slots.roll(1))


def off_by_one(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool, ring: torch.Tensor, rows: StateRows
) -> torch.Tensor:
    """A convolution that reads its ring one place too early."""
    shifted = reference.short_conv(x, weight, bias, silu, ring.roll(1, dims=1), rows)
    reference.short_conv(x, weight, bias, silu, ring, rows)
    return shifted


def planted(change: Callable[[StateRows], StateRows]) -> Recurrences:
    """The reference on changed rows."""

    def on(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *inputs: function(*inputs[:-1], change(inputs[-1]))

    scans = ("gated_delta", "ssd_scan", "selective_scan")
    return replace(REFERENCE, name="planted", **{name: on(getattr(reference, name)) for name in scans})


DEFECTS = {
    "no replay": planted(no_replay),
    "replay one short": planted(one_short),
    "drafts folded in": planted(drafts_folded_in),
    "wrong slot": planted(wrong_slot),
    "ring of the convolution off by one": replace(REFERENCE, name="planted", short_conv=off_by_one),
}


def model_of(name: str, drafts: int = 3) -> Any:
    head = RecallHead([greedy_text(name, prompt, 16) for prompt in PROMPTS], 0.6)
    return wrap(tiny_hybrid(name), head, num_speculative_tokens=drafts, max_model_len=128)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "mamba", pytest.param("falcon_h1", marks=pytest.mark.long)])
@pytest.mark.thorough
def test_a_wrong_recurrence_is_refused_by_the_self_test(name: str) -> None:
    wrapped = model_of(name)
    target = wrapped.target
    assert self_test(target) < 1e-4
    for defect, functions in DEFECTS.items():
        target.states.functions = functions
        with pytest.raises(UnsupportedModelError, match="comes out wrong"):
            self_test(target)
            pytest.fail(f"not seen: {defect}")


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_few_drafts_show_a_wrong_replay_as_well(drafts: int) -> None:
    target = model_of("qwen3_next", drafts).target
    for defect in ("no replay", "replay one short", "drafts folded in"):
        target.states.functions = DEFECTS[defect]
        with pytest.raises(UnsupportedModelError, match="comes out wrong"):
            self_test(target)


@pytest.mark.slow
@pytest.mark.parametrize("defect", [d for d in DEFECTS if d != "wrong slot"])
@pytest.mark.cases(1)
def test_the_small_copy_shows_it_too(defect: str, every_self_test: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention.recurrence.runner.recurrences_of", lambda *_: DEFECTS[defect])
    with pytest.raises(UnsupportedModelError, match="a small copy of it"):
        wrap(tiny_hybrid("qwen3_next"), max_model_len=128)


WRONG_INDEX: dict[str, tuple[str, Any]] = {
    "no replay": ("specdec.extras.recurrent_states.replay_of", lambda start, folded: start * 0),
    "replay one short": (
        "specdec.extras.recurrent_states.replay_of",
        lambda start, folded: (start - folded - 1).clip(0),
    ),
    "drafts folded in": (
        "specdec.extras.recurrent_states.folded_after",
        lambda start, num_new, folded: start + num_new + 1,
    ),
    "one slot for two rows": ("specdec.extras.recurrent_states.slots_of_rows", lambda rows: rows // 2 + 1),
}


@pytest.mark.long
@pytest.mark.parametrize("defect", WRONG_INDEX)
def test_wrong_arithmetic_of_the_engine_shows_in_the_tokens(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = model_of("qwen3_next")
    right = [greedy_text("qwen3_next", prompt, 16)[len(prompt) :] for prompt in PROMPTS]
    assert [list(c.token_ids) for c in wrapped.generate(PROMPTS, SamplingParams(16))] == right
    monkeypatch.setattr(*WRONG_INDEX[defect])
    try:
        found = [list(c.token_ids) for c in wrapped.generate(PROMPTS, SamplingParams(16))]
    except RoundFailedError as error:
        assert "two rows share" in str(error) or "replays what" in str(error)
    else:
        assert found != right
