"""A head in every published layout, round by round in a full engine: drafts and logits are those of a head by hand.

The head by hand (`tests.by_hand`) shares no code with `drafters` and no configuration with the file that is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import random_prompts, wrap

from specdec.requests.sampling import SamplingParams
from tests.head_layouts import LAYOUTS, Layout, taps_of, target

PROMPTS = random_prompts((5, 27, 2))
GREEDY = SamplingParams(max_new_tokens=18, return_drafts=True)
K = 3
Rounds = list[tuple[list[int], list[int], float]]


def engine_rounds(layout: Layout, folder: Path, plant: Callable[[Any], None] | None = None) -> tuple[Rounds, list[int]]:
    """(drafts of the engine, drafts by hand, largest difference of logits) of every round; how many were accepted."""
    model = target()
    wrapped = wrap(model, str(folder), num_speculative_tokens=K, max_num_seqs=1)
    if plant is not None:
        plant(wrapped.head)
    said = recorded(wrapped.head)
    rounds: Rounds = []
    accepted: list[int] = []
    for prompt in PROMPTS:
        said.clear()
        (completion,) = wrapped.generate([prompt], GREEDY)
        rounds += compared(layout, model, prompt, completion, said)
        accepted += [r.accepted for r in completion.stats.rounds if r.drafted]
    wrapped.close()
    return rounds, accepted


def recorded(head: Any) -> list[np.ndarray]:
    """What the head's `logits` gives from now on, row by row."""
    said: list[np.ndarray] = []
    own = head.logits

    def logits(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = own(x)
        said.extend(out.double().numpy())
        return out

    head.logits = logits
    return said


def compared(layout: Layout, model: Any, prompt: list[int], completion: Any, said: list[np.ndarray] | None) -> Rounds:
    """Of one completion; said: the logits of all its drafts, None where nobody recorded them."""
    ids = prompt + completion.token_ids
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    by_hand = layout.by_hand()
    taps = taps_of(states, by_hand.taps)
    rounds, read, bonus, first = [], 0, len(prompt), 0
    for stats, drafts in zip(completion.stats.rounds, completion.drafts, strict=True):
        if len(drafts):
            own, logits = by_hand.draft(ids[read + 1 : bonus + 1], taps[read:bonus], len(drafts))
            ours = logits if said is None else said[first : first + len(drafts)]
            apart = max(float(np.abs(a - b).max()) for a, b in zip(ours, logits, strict=True))
            rounds.append((list(drafts), own, apart))
            read, first = bonus, first + len(drafts)
        bonus += stats.emitted
    return rounds


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@torch.inference_mode()
@pytest.mark.cases(1)
def test_drafts_and_logits_are_those_by_hand(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]()
    rounds, accepted = engine_rounds(layout, layout.write(tmp_path))
    assert len(rounds) > 20 and all(len(ours) for ours, _, _ in rounds)
    assert [ours for ours, _, _ in rounds] == [by_hand for _, by_hand, _ in rounds]
    assert max(apart for _, _, apart in rounds) < 2e-3
    right = 1 if name == "safeailab_narrow" else 2  # that one cannot pass an embedding of another width on
    assert 0 in accepted and max(accepted) >= right, "drafts must be right and wrong often enough to test something"


def swap_concat(head: Any) -> None:
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(head.midlayer.self_attn, name).weight
        weight.copy_(weight.roll(weight.shape[1] // 2, dims=1))


def swap_norms(head: Any) -> None:
    layer = head.midlayer
    layer.input_layernorm, layer.hidden_norm = layer.hidden_norm, layer.input_layernorm


def other_feedback(head: Any) -> None:
    other = "pre_norm" if head.spec.feedback == "post_norm" else "post_norm"
    head.spec = replace(head.spec, feedback=other)


def other_residual(head: Any) -> None:
    head.midlayer.norm_before_residual = not head.midlayer.norm_before_residual


def positions_from_zero(head: Any) -> None:
    head.rotary.spec = replace(head.rotary.spec, first_position=0)


def offset_ids(head: Any) -> None:
    head.target_ids.add_(1)


def raw_logits(head: Any) -> None:
    head.norm.weight.fill_(1.0)


def wrong_theta(head: Any) -> None:
    head.rotary.frequencies.copy_(head.rotary.frequencies.sqrt())


def swapped_fc(head: Any) -> None:
    head.fc.weight.copy_(head.fc.weight.roll(head.fc.weight.shape[1] // 2, dims=1))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "defect"),
    [
        ("speculators_llama", swap_concat),
        ("speculators_llama", other_feedback),
        pytest.param("speculators_llama", other_residual, marks=pytest.mark.long),
        ("speculators_llama", offset_ids),
        pytest.param("speculators_llama", swap_norms, marks=pytest.mark.long),
        ("speculators_qwen3", positions_from_zero),
        ("deepspec", wrong_theta),
        ("specforge", raw_logits),
        ("eagle1", swapped_fc),
    ],
)
@torch.inference_mode()
def test_planted_defects_are_seen(name: str, defect: Callable[[Any], None], tmp_path: Path) -> None:
    layout = LAYOUTS[name]()
    rounds, _ = engine_rounds(layout, layout.write(tmp_path), defect)
    assert any(ours != by_hand for ours, by_hand, _ in rounds) or max(apart for _, _, apart in rounds) > 2e-3
