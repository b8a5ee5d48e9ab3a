"""The whole acceptance evaluation on a scripted model: document, resume, failures, and the formulas of others."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evals.acceptance.acceptance import BASELINE, Plan, run, settings, sweep
from evals.errors import DataError, RunStoreError
from evals.runs.answers import write_spec_bench
from evals.runs.conversations import Configuration, ModelSpec, Work, Worker, run_chunk
from evals.runs.store import RunStore
from specdec.errors import SpecdecWarning
from tests.evals.documents import without_times


def executor(plant: SimpleNamespace, **models: Any) -> Worker:
    return Worker({key: ModelSpec(key) for key in models}, plant.loader(models))


def evaluate(
    plant: SimpleNamespace, folder: Path, model: Any, plan: Plan, report: Any = lambda a: None
) -> dict[str, Any]:
    runner = executor(plant, main=model)
    with RunStore(folder, settings(plan, runner.facts())) as store:
        return run(runner, plan, store, report)


def plan_of(plant: SimpleNamespace, count: int = 12, ks: tuple[int, ...] = (1, 3), **more: Any) -> Plan:
    data = plant.questions(count, turns=2, categories=("math", "writing", "qa"))
    return Plan(data, sweep(ks), plant.asking(max_new_tokens=64), **{"warmup": 0, **more})


@pytest.mark.slow
def test_document_recovers_what_was_planted(plant: SimpleNamespace, tmp_path: Path) -> None:
    document = evaluate(plant, tmp_path / "run", plant.Model(rates=(0.8, 0.6, 0.5), length=120), plan_of(plant, 60))
    arms = {arm["name"]: arm for arm in document["arms"]}
    assert arms[BASELINE]["metrics"]["tau"]["estimate"] == 1.0
    for found, truth in zip(arms["K=3"]["conditional"], (0.8, 0.6, 0.5), strict=True):
        assert found["low"] < truth < found["high"]
    assert arms["K=3"]["identical_to_target_alone"] == {"questions": 60, "identical": 60}
    assert list(arms["K=3"]["by_category"]) == ["math", "writing", "qa"]
    assert sum(arms["K=3"]["histogram"]) == sum(row["arms"]["K=3"]["rounds"] for row in document["questions"])


def test_each_category_has_its_own_positions(plant: SimpleNamespace, tmp_path: Path) -> None:
    """Recomputed from the recorded rounds of each category."""
    plan = plan_of(plant, 12, ks=(3,))
    runner = executor(plant, main=plant.Model(overshoot=True))
    store = RunStore(tmp_path / "run", settings(plan, runner.facts()))
    arm = run(runner, plan, store, lambda a: None)["arms"][1]
    assert {key: len(group["unconditional"]) for key, group in arm["by_category"].items()} == dict.fromkeys(
        ("math", "writing", "qa"), 3
    )
    for category, group in arm["by_category"].items():
        own = [a for a in store.answers.values() if a.arm == "K=3" and a.category == category]
        rounds = [record.trimmed for answer in own for record in answer.rounds]
        for j in range(1, 4):
            accepted = sum(r.accepted >= j for r in rounds)
            reached = sum(r.drafted >= j and r.accepted >= j - 1 for r in rounds)
            assert group["unconditional"][j - 1]["estimate"] == pytest.approx(
                accepted / sum(r.drafted >= j for r in rounds)
            )
            assert group["conditional"][j - 1]["estimate"] == pytest.approx(accepted / reached)
            assert group["conditional"][j - 1]["low"] is not None


@pytest.mark.slow
def test_predicted_speedup_follows_from_the_planted_times(plant: SimpleNamespace, tmp_path: Path) -> None:
    model = plant.Model(rates=(0.8,), length=400, seconds=0.1)
    document = evaluate(plant, tmp_path / "run", model, plan_of(plant, 40, ks=(2, 4), predict_batch_sizes=(1, 8)))
    prediction = document["timing"]["prediction"]
    cell = next(c for c in prediction["table"] if (c["batch_size"], c["k"]) == (1, 3))
    expected = (1 + 0.8 + 0.64 + 0.512) / (1 + 0.1 * 3)
    assert cell["speedup"] == pytest.approx(expected, rel=0.05) and not cell["extrapolated"]
    best = max(range(1, 5), key=lambda k: sum(0.8**j for j in range(k + 1)) / (1 + 0.1 * k))
    assert abs(prediction["best"]["1"]["k"] - best) <= 1
    assert {c["k"] for c in prediction["table"] if c["extrapolated"]} == {5, 6, 7, 8}


class Killed(Exception):
    """Stands for the process being killed."""


@pytest.mark.slow
def test_a_killed_and_resumed_run_gives_the_same_document(plant: SimpleNamespace, tmp_path: Path) -> None:
    plan = plan_of(plant)
    whole = evaluate(plant, tmp_path / "whole", plant.Model(), plan)

    done: list[int] = []

    def kill(answers: Any) -> None:
        done.append(len(answers))
        if sum(done) >= 12:
            raise Killed

    with pytest.raises(Killed):
        evaluate(plant, tmp_path / "cut", plant.Model(), plan, kill)
    with (tmp_path / "cut" / "answers.jsonl").open("ab") as out:
        out.write(b'{"key": "abc", "answer": {"question_id": "7", "ar')  # killed while writing
    model = plant.Model()
    with pytest.warns(SpecdecWarning, match=r"answers\.jsonl:13: the last line was cut off"):
        resumed = evaluate(plant, tmp_path / "cut", model, plan)
    assert without_times(resumed) == without_times(whole)
    assert len(model.calls) == (12 - 4) * 3 * 2  # eight questions left, three configurations, two turns
    assert evaluate(plant, tmp_path / "cut", silent := plant.Model(), plan)["arms"] and silent.calls == []


def test_a_run_folder_of_other_settings_is_refused(plant: SimpleNamespace, tmp_path: Path) -> None:
    evaluate(plant, tmp_path / "run", plant.Model(), plan_of(plant, 3))
    with pytest.raises(RunStoreError, match=r"other settings \(batch_size: 1 -> 2\)"):
        evaluate(plant, tmp_path / "run", plant.Model(), plan_of(plant, 3, batch_size=2))
    with pytest.raises(RunStoreError, match="is not empty and holds no run"):
        evaluate(plant, tmp_path, plant.Model(), plan_of(plant, 3))


def test_a_damaged_line_is_named(plant: SimpleNamespace, tmp_path: Path) -> None:
    evaluate(plant, tmp_path / "run", plant.Model(), plan_of(plant, 3))
    path = tmp_path / "run" / "answers.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], '{"key": 1}\n', *lines[1:]]))
    with pytest.raises(RunStoreError, match=r"answers\.jsonl:2: damaged"):
        evaluate(plant, tmp_path / "run", plant.Model(), plan_of(plant, 3))


def test_a_failing_question_is_recorded_and_does_not_stop_the_run(plant: SimpleNamespace, tmp_path: Path) -> None:
    document = evaluate(plant, tmp_path / "run", plant.Model(poison="question 4 "), plan_of(plant, 12, batch_size=3))
    assert {f["question_id"] for f in document["failures"]} == {"4"}
    assert document["failures"][0]["error"] == "InvalidInputError: the prompt is poisoned"
    assert [row["id"] for row in document["questions"]] == [str(i) for i in range(12) if i != 4]


def test_a_run_in_which_everything_fails_says_so(plant: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="every question failed; the first error: InvalidInputError"):
        evaluate(plant, tmp_path / "run", plant.Model(poison="question"), plan_of(plant, 3))


@pytest.mark.slow
def test_batches_give_the_same_document_as_single_questions(plant: SimpleNamespace, tmp_path: Path) -> None:
    one = evaluate(plant, tmp_path / "one", plant.Model(), plan_of(plant, batch_size=1))
    five = evaluate(plant, tmp_path / "five", plant.Model(), plan_of(plant, batch_size=5))
    assert without_times(one["arms"]) == without_times(five["arms"])


def test_two_arms_without_a_baseline_are_compared_in_pairs(plant: SimpleNamespace, tmp_path: Path) -> None:
    arms = (Configuration("bad", 3, "a"), Configuration("good", 3, "b"))
    plan = Plan(plant.questions(40), arms, plant.asking(), warmup=0)
    runner = executor(plant, a=plant.Model(rates=(0.3,), length=60), b=plant.Model(rates=(0.9,), length=60))
    document = run(runner, plan, RunStore(tmp_path / "run", settings(plan, runner.facts())), lambda a: None)
    difference = document["differences"]["metrics"]["tau"]
    assert difference["low"] > 1 and "timing" not in document
    assert document["differences"]["timing"]["speed_ratio"]["estimate"] > 0


def test_second_turn_sees_the_models_own_first_answer(plant: SimpleNamespace) -> None:
    asked: list[str] = []
    model = plant.Model()
    plain = model.complete
    model.complete = lambda prompt, params: asked.append(prompt) or plain(prompt, params)
    (answer,) = run_chunk(
        {"main": model}, Work(0, plant.questions(1, turns=2).questions, (Configuration("a", 0),), plant.asking())
    )
    first = answer.turns[0].text
    assert asked[1] == f"<user>question 0 turn 0<assistant>{first}<user>question 0 turn 1<assistant>"


def test_arms_take_turns_at_being_first(plant: SimpleNamespace) -> None:
    order: list[int] = []
    model = plant.Model()
    plain = model.complete
    model.complete = lambda prompt, params: order.append(params.num_speculative_tokens) or plain(prompt, params)
    chunk = plant.questions(1).questions
    answers = [run_chunk({"main": model}, Work(i, chunk, sweep((1, 3)), plant.asking())) for i in range(3)]
    assert order == [0, 1, 3, 1, 3, 0, 3, 0, 1]
    assert [[a.arm for a in row] for row in answers] == [[BASELINE, "K=1", "K=3"]] * 3


def test_sampling_seeds_depend_on_question_and_turn_only(plant: SimpleNamespace, tmp_path: Path) -> None:
    plan = Plan(plant.questions(6, turns=2), sweep((2,)), plant.asking(temperature=0.8), warmup=0)
    first, again = (evaluate(plant, tmp_path / name, plant.Model(), plan) for name in "ab")
    assert without_times(first) == without_times(again)
    store = RunStore(tmp_path / "a", settings(plan, executor(plant, main=plant.Model()).facts()))
    assert len({answer.turns[0].token_ids for answer in store.answers.values() if answer.arm == BASELINE}) == 6


def test_spec_bench_and_eagle_formulas_give_the_same_numbers(plant: SimpleNamespace, tmp_path: Path) -> None:
    """Their scripts' formulas, written anew from what they compute, applied to the files that we write."""
    plan = plan_of(plant, 30, ks=(3,))
    runner = executor(plant, main=plant.Model(overshoot=True))
    store = RunStore(tmp_path / "run", settings(plan, runner.facts()))
    document = run(runner, plan, store, lambda a: None)
    write_spec_bench(tmp_path / "files", list(store.answers.values()), "scripted")
    paths = sorted((tmp_path / "files").iterdir(), reverse=True)
    assert [path.name for path in paths] == ["target-alone.jsonl", "k-3.jsonl"]
    base, fast = ([json.loads(row) for row in path.read_text().splitlines()] for path in paths)
    tokenizer = plant.Tokenizer()
    arm = document["arms"][1]
    for category in (None, "math", "writing", "qa"):
        found = arm if category is None else arm["by_category"][category]
        rows, rows0 = ([r for r in side if category in (None, r["category"])] for side in (fast, base))
        choices, choices0 = ([r["choices"][0] for r in side] for side in (rows, rows0))
        accepted = np.mean([n for c in choices for n in c["accept_lengths"]])
        rates = np.mean([sum(c["new_tokens"]) / sum(c["wall_time"]) for c in choices])
        rates0 = np.mean(
            [sum(len(tokenizer(t)["input_ids"]) - 1 for t in c["turns"]) / sum(c["wall_time"]) for c in choices0]
        )
        assert found["metrics"]["tau_spec_bench"]["estimate"] == pytest.approx(accepted)
        assert found["timing"]["speedup_spec_bench"]["estimate"] == pytest.approx(rates / rates0)
        eagle = sum(sum(c["new_tokens"]) for c in choices) / sum(i + 1 for c in choices for i in c["idxs"])
        assert found["metrics"]["tau_eagle"]["estimate"] == pytest.approx(eagle)
        quoted = sum(sum(c["new_tokens"]) for c in choices) / sum(i for c in choices for i in c["idxs"])
        assert found["metrics"]["tau_eagle_idxs"]["estimate"] == pytest.approx(quoted)
    assert all(set(row) >= {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"} for row in base)
    assert base[0]["choices"][0]["decoding_steps"] == [39, 39]


def test_document_is_plain_json(plant: SimpleNamespace, tmp_path: Path) -> None:
    document = evaluate(plant, tmp_path / "run", plant.Model(), plan_of(plant, 1, ks=(1,), worst=1))
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["schema"] == "specdec.acceptance" and document["schema_version"] == 1


def test_worst_questions_are_shown_with_their_drafts(plant: SimpleNamespace, tmp_path: Path) -> None:
    document = evaluate(plant, tmp_path / "run", plant.Model(), plan_of(plant, 9, worst=2))
    taus = sorted(row["arms"]["K=3"]["tau"] for row in document["questions"])
    assert [entry["tau"] for entry in document["worst"]] == taus[:2]
    pieces = document["worst"][0]["turns"][0]
    assert {"accepted", "rejected", "target"} == {kind for kind, _ in pieces}
    kept = "".join(text for kind, text in pieces if kind != "rejected")
    assert len(kept) == 39 and set("".join(text for kind, text in pieces if kind == "rejected")) == {"?"}


def test_more_runs_can_be_added_to_a_finished_one(plant: SimpleNamespace, tmp_path: Path) -> None:
    """Answers of the first run are kept; their times and those of the others are taken together."""
    once = evaluate(plant, tmp_path / "run", plant.Model(), plan_of(plant, 4, ks=(3,)))
    model = plant.Model(seconds=0.3)  # slower in its further runs
    again = evaluate(plant, tmp_path / "run", model, plan_of(plant, 4, ks=(3,), repeats=3))
    assert (once["timing"]["runs"], again["timing"]["runs"]) == (1, 3)
    assert sum(model.calls) == 2 * 2 * 2 * 4  # runs, configurations, turns, questions
    assert without_times(once["arms"]) == without_times(again["arms"])
    assert len({answer for _, answer in RunStore(tmp_path / "run", settings_of(plant)).answers}) == 6


def settings_of(plant: SimpleNamespace) -> dict[str, Any]:
    return settings(plan_of(plant, 4, ks=(3,)), executor(plant, main=plant.Model()).facts())
