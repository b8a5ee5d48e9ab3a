"""The agreement check on the built-in pair: the right head is fine, planted wrong readings are found and named.

Oracle: acceptance in the engine's own rounds, and the configuration that the built-in head was trained with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fakes import hooks_of

from drafters.base import FINAL_NORM
from drafters.eagle3.family import other_readings
from drafters.eagle3.head import Eagle3Head
from specdec import SamplingParams, SpeculativeModel
from specdec.errors import InvalidInputError
from specdec.extensions.head_check.check import Agreement, check_agreement
from specdec.extensions.head_check.measurement import PROMPTS, Passage, aux_states, chains, check_map
from specdec.requests.stats import RoundRecord
from specdec.wrapped.probing import probe_target

CHATS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:4]]


@pytest.fixture(scope="module")
def model() -> Iterator[SpeculativeModel]:
    with SpeculativeModel.from_pretrained("gsm-llama", "auto", device="cpu") as loaded:
        yield loaded


def checked(model: SpeculativeModel, head: Any = "gsm-llama-eagle3", **overrides: Any) -> Agreement:
    """The check of a head on the target that is loaded already."""
    options = {"num_speculative_tokens": 4, "max_num_seqs": 4, "kv_cache_tokens": 2048, "max_model_len": 512}
    with SpeculativeModel.from_pretrained(
        model.hf_model, head, tokenizer=model.tokenizer, head_overrides=overrides or None, **options
    ) as wrapped:
        return check_agreement(wrapped, CHATS)


def chains_and_rounds(
    model: SpeculativeModel, head: Any, done: list[Any], passages: list[Passage]
) -> Iterator[tuple[int, RoundRecord]]:
    """What the check says is accepted at the bonus token of each round, and the round; not an answer's last ones."""
    states = aux_states(probe_target(model.hf_model), passages, head.aux_layers)
    for one, passage, state in zip(done, passages, states, strict=True):
        found = chains(head, [passage], [state], model.num_speculative_tokens)
        place = 0  # of the bonus token in the answer
        for record in one.stats.rounds:
            if place + 1 + record.drafted < len(one.token_ids):
                yield int(found.accepted[place]), record
            place += record.emitted


@pytest.mark.slow
def test_chains_are_what_the_rounds_accepted(model: SpeculativeModel) -> None:
    done = model.generate(CHATS, SamplingParams(max_new_tokens=40))
    passages = [Passage.of(one, model.device) for one in done]
    head = model.head
    assert isinstance(head, Eagle3Head)
    pairs = list(chains_and_rounds(model, head, done, passages))
    assert len(pairs) > 15 and all(accepted == record.accepted for accepted, record in pairs)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_right_head_is_fine(model: SpeculativeModel) -> None:
    found = checked(model)
    assert found.verdict == "fine" and found.best is None and len(found.tried) >= 8
    assert found.chains is not None and found.chains.unconditional[0] > 0.7
    assert found.rounds.tau > 3
    assert not any(tried.is_better for tried in found.tried)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "right", "cause"),
    [
        ({"aux_layers": [1, 3, 4]}, {"aux_layers": [2, 4, 5]}, "taken for aux layers.*aux_layers: chosen by the user"),
        pytest.param(
            {"feedback": "post_norm"}, {"feedback": "pre_norm"}, "norm_output says otherwise", marks=pytest.mark.long
        ),
        (
            {"feedback": "post_norm", "norm_before_residual": True},
            {"norm_before_residual": False},
            "readers differ in its default",
        ),
    ],
)
@pytest.mark.thorough
def test_a_wrong_reading_is_found_and_named(
    wrong: dict[str, Any], right: dict[str, Any], cause: str, model: SpeculativeModel
) -> None:
    found = checked(model, **wrong)
    assert found.verdict == "misread" and found.best is not None
    assert dict(found.best.reading.overrides) == right
    assert re.search(cause, found.cause)
    assert found.best is found.tried[0] and found.best.gain > 0.1


def of_other_lm_head(model: SpeculativeModel, change: Any) -> Any:
    """The built-in head with another lm_head."""
    head = model.head
    assert isinstance(head, Eagle3Head)
    other = head.reread(head.spec)
    torch.manual_seed(0)
    other.lm_head.load_state_dict({name: change(t) for name, t in head.lm_head.state_dict().items()}, assign=True)
    return other


@pytest.mark.slow
@pytest.mark.thorough
def test_a_head_without_skill_is_low_however_it_is_read(model: SpeculativeModel) -> None:
    found = checked(model, of_other_lm_head(model, lambda t: torch.randn_like(t) * t.std()))
    assert found.verdict == "low" and found.best is None
    assert "another model of the same shape" in found.cause
    assert found.chains is not None and found.chains.unconditional[0] < 0.1


@pytest.mark.slow
@pytest.mark.thorough
def test_a_map_of_other_rows_than_the_lm_heads_is_named(model: SpeculativeModel) -> None:
    """As with the d2t of another export: the drafts are as good as ever, and stand for other tokens."""
    head = model.head
    assert isinstance(head, Eagle3Head)
    rows = torch.arange(len(head.target_ids)).roll(1)  # draft id 1 is what was draft id 0
    found = checked(model, of_other_lm_head(model, lambda t: t[rows]))
    assert found.verdict == "low" and found.best is None
    said = re.search(
        r"d2t\) does not belong.*draft id (\d+) is token (\d+) by d2t, and comes with token (\d+)", found.cause
    )
    assert said is not None
    draft, mapped, token = (int(number) for number in said.groups())
    assert mapped == head.target_ids[draft] and token == head.target_ids[draft - 1]


@pytest.mark.slow
def test_the_right_map_is_never_called_wrong(model: SpeculativeModel) -> None:
    head, probed = model.head, probe_target(model.hf_model)
    assert isinstance(head, Eagle3Head)
    passages = [Passage.of(one, model.device) for one in model.generate(CHATS, SamplingParams(max_new_tokens=40))]
    found = check_map(head, passages, aux_states(probed, passages, head.aux_layers))
    assert found.mapped > 0.7 and found.num_ids > 8 and not found.is_wrong
    assert found.mapped > found.learnt > 0.25  # what half of so few answers teaches is less than the map knows


@pytest.mark.slow
def test_readings_share_the_heads_tensors_and_leave_it_alone(model: SpeculativeModel) -> None:
    head = model.head
    assert isinstance(head, Eagle3Head)
    spec = head.spec
    readings = other_readings(head, model.target.num_layers, rope_theta=5e5)
    assert len(readings) > 8
    for reading in readings:
        again = reading.head
        assert isinstance(again, Eagle3Head)
        assert again.fc.weight.data_ptr() == head.fc.weight.data_ptr()
        assert again.target_ids.tolist() == head.target_ids.tolist()
        assert [name for name in vars(spec) if getattr(again.spec, name) != getattr(spec, name)] == [reading.field]
    assert head.spec is spec


@pytest.mark.slow
def test_without_drafts_there_is_nothing_to_check(model: SpeculativeModel) -> None:
    with (
        SpeculativeModel.from_pretrained(model.hf_model, tokenizer=model.tokenizer, max_num_seqs=1) as alone,
        pytest.raises(InvalidInputError, match="needs a head that drafts"),
    ):
        check_agreement(alone)


def test_the_check_leaves_no_hook_on_the_target(model: SpeculativeModel) -> None:
    probed, before = probe_target(model.hf_model), hooks_of(model.hf_model)
    aux_states(probed, [Passage(torch.arange(5, 15), 5)], (0, 3, FINAL_NORM))
    assert hooks_of(model.hf_model) == before


@pytest.mark.slow
@pytest.mark.thorough
def test_prompts_that_are_too_long_to_compare_are_refused(model: SpeculativeModel) -> None:
    with pytest.raises(InvalidInputError, match="tokens with its answer; at most 1024 are compared"):
        check_agreement(model, "eggs " * 1100)
