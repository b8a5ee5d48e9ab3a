"""What a check may take: measured on a scripted model, and fitted into a budget."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from evals.acceptance.acceptance import sweep
from evals.lossless.distribution import WINDOW
from evals.lossless.greedy import Replay
from evals.lossless.lossless import Cost
from evals.runs.conversations import ModelSpec, Worker
from evals.runs.executor import Plan
from specdec.cli.main import cli
from specdec.errors import InvalidInputError

COST = Cost(question_s=10.0, sample_s=2.0)


@pytest.fixture
def plan(plant: SimpleNamespace) -> Plan:
    return Plan(plant.questions(200, turns=2), sweep((3,)), plant.asking(max_new_tokens=50), batch_size=4)


def measured(plant: SimpleNamespace, plan: Plan, mode: str, **model: Any) -> Cost:
    """Of a scripted model, whose rounds take 1 + seconds x drafts, in batches of 4."""
    worker = Worker({"main": ModelSpec("main")}, plant.loader({"main": plant.Model(rates=(0.0,), **model)}))
    return Cost.measured(worker, plan, mode, 2)


def test_the_cost_is_that_of_rounds_without_an_accepted_draft(plant: SimpleNamespace, plan: Plan) -> None:
    token_s = (1.0 + 1.0) / 4  # of one question: its share of a round of the target alone and of one with K=3
    prompt_s = (0.5 + 0.5) / 4
    greedy = 2 * (prompt_s + 50 * token_s)
    assert measured(plant, plan, "greedy", seconds=0.0) == Cost(pytest.approx(greedy), 0.0)
    search = (0.5 + WINDOW * 1.0 + 3 * 0.5) / 4
    sample = 2 * 4 * ((3 + 2) * token_s + 3 * 0.5 / 4 / 2)
    assert measured(plant, plan, "sampled", seconds=0.0) == Cost(pytest.approx(search), pytest.approx(sample))
    keyed = measured(plant, plan, "sampled", seconds=0.0, keyed=True)
    assert keyed == Cost(pytest.approx(greedy + search), pytest.approx(sample))
    both = measured(plant, plan, "both", seconds=0.0)
    assert both == Cost(pytest.approx(greedy + search), pytest.approx(sample))
    assert both.of(20, 300) == pytest.approx(20 * both.question_s + 300 * both.sample_s)
    assert measured(plant, plan, "greedy", seconds=0.5).question_s > 1.5 * greedy


def test_questions_that_fail_cost_nothing(plant: SimpleNamespace, plan: Plan) -> None:
    assert measured(plant, plan, "both", poison="question").within(1.0, 200, 1000) == (200, 1000)


@pytest.mark.parametrize("minutes", [4, 25, 60, 1e6])
def test_as_much_as_fits_is_taken(minutes: float) -> None:
    questions, samples = COST.within(60 * minutes, 200, 1000)
    assert COST.of(questions, samples) <= 60 * minutes and 100 <= samples <= 1000 and 1 <= questions <= 200
    if (questions, samples) != (200, 1000):
        assert COST.of(questions, samples) > 60 * minutes - 20 and COST.of(200, 1000) > 60 * minutes


def test_questions_and_samples_fall_by_the_same_share_down_to_the_fewest_samples() -> None:
    assert COST.within(2000, 200, 1000) == (100, 500)
    assert COST.within(250, 200, 1000) == (5, 100)
    assert Cost(10.0, 0.0).within(100, 200, 1000) == (10, 1000)


def test_a_budget_below_one_question_is_refused() -> None:
    message = r"one question and 100 samples of each place may take 0:03:30, more than --budget; raise it, or"
    with pytest.raises(InvalidInputError, match=message):
        COST.within(60, 200, 1000)


@pytest.mark.slow
def test_the_command_says_what_it_takes_and_keeps_to_the_budget(
    plant: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*more: str, **model: Any) -> Any:
        monkeypatch.setattr(Worker.__init__, "__defaults__", (lambda spec: plant.Model(**model),))
        asked = ["eval", "lossless", "--data", "arithmetic", "--mode", "greedy", "--max-new-tokens", "30"]
        return CliRunner().invoke(cli, [*asked, "-k", "3", "--batch-size", "1", *more])

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Replay, "__init__", lambda self, model: None)
    whole = run("--limit", "20", seconds=0.0, rates=(0.0,))
    assert whole.exit_code == 0, whole.output
    assert "This may take 0:20:20 if every answer has --max-new-tokens; --budget MINUTES takes less" in whole.output
    assert "20 of 20 identical" in whole.output
    few = run("--limit", "20", "--budget", "5", seconds=0.0, rates=(0.0,))
    assert few.exit_code == 0 and "Within --budget: --limit 4 (of 20) --samples 1000 (of 1000); give" in few.output, (
        few.output
    )
    assert "4 of 4 identical" in few.output
    none = run("--budget", "0.1", seconds=0.0, rates=(0.0,))
    assert none.exit_code == 2 and "one question and 1000 samples of each place may take" in none.output
