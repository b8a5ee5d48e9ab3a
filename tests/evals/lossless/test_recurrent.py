"""The lossless evaluation of a target without attention: K=0 against K=3."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakes import LetterTokenizer, wrap

from evals.acceptance.acceptance import sweep
from evals.lossless.greedy import compare_greedy
from evals.runs.conversations import ModelSpec, Work, Worker, run_chunk
from evals.runs.verdict import Verdict
from tests.hybrids import RecallHead, greedy_text, tiny_hybrid

pytest.importorskip("scipy")


@pytest.mark.slow
@pytest.mark.parametrize("planted", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_a_mamba2_target_says_the_same_with_and_without_drafts(
    plant: SimpleNamespace, planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: what was accepted is not replayed, so that states fall behind."""
    data, arms = plant.questions(4), sweep((3,))
    asking = replace(plant.asking(), templated=False)
    prompts = [LetterTokenizer()(question.turns[0])["input_ids"] for question in data.questions]
    texts = [greedy_text("mamba2", prompt, asking.params.max_new_tokens) for prompt in prompts]
    model = wrap(tiny_hybrid("mamba2"), RecallHead(texts, 0.7), num_speculative_tokens=3, max_model_len=128)
    if planted:
        monkeypatch.setattr("specdec.extras.recurrent_states.replay_of", lambda start, folded: 0 * start)
    executor = Worker({"main": ModelSpec("main")}, plant.loader({"main": model}))
    answers = run_chunk({"main": model}, Work(0, data.questions, arms, asking))
    kept = {arm.name: [a for a in answers if a.arm == arm.name] for arm in arms}
    found = compare_greedy(executor, data, arms, kept, asking)
    assert found["verdict"] is (Verdict.FAIL if planted else Verdict.PASS)
    assert found["arms"][0]["identical"] == (0 if planted else 4)
