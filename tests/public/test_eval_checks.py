"""A check that had nothing to look at has not passed; a run folder belongs to one run at a time."""

from __future__ import annotations

import dataclasses
import importlib
import json
import resource
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import specdec
from specdec import SamplingParams

pytest.importorskip("scipy")

ROOT = Path(__file__).resolve().parents[2]
MODEL = ("--device", "cpu", "--data", "arithmetic")
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def specdec_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unchecked: None
) -> Run:
    """Run the `specdec` script of this tree in an empty folder: arguments -> (exit code, what it printed)."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["specdec"].partition(":")
    main = getattr(importlib.import_module(module), name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str]:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["specdec", *arguments])
            with pytest.raises(SystemExit) as ended:
                main()
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out + printed.err

    return run


@pytest.fixture
def altered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Plant a defect: `before` changes the parameters of requests with drafts, `after` their completions."""
    plain = specdec.SpeculativeModel.generate

    def plant(before: Any = lambda one: one, after: Any = lambda completion: completion) -> None:
        def generate(self: Any, prompts: Any, params: Any = None) -> list[Any]:
            each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
            done = plain(self, prompts, [before(one) if one.num_speculative_tokens else one for one in each])
            pairs = zip(each, done, strict=True)
            return [after(completion) if one.num_speculative_tokens else completion for one, completion in pairs]

        monkeypatch.setattr(specdec.SpeculativeModel, "generate", generate)

    return plant


LOSSLESS = ("eval", "lossless", *MODEL, "--limit", "4", "--max-new-tokens", "48", "--k", "3")
OF_SAMPLES = ("--mode", "sampled", "--sample-prompts", "1", "--samples", "100")
SAMPLED = (*LOSSLESS, *OF_SAMPLES, "--max-new-tokens", "24", "--k", "1")
"""Of one draft and 24 tokens: each named defect would still be found with a probability of 1.00 (to 1e-9)."""


@pytest.mark.slow
def test_sampling_where_nothing_is_open_is_not_a_pass(specdec_command: Run) -> None:
    code, text = specdec_command(*LOSSLESS, "--mode", "sampled", "--samples", "100", "--max-new-tokens", "1")
    assert "NOT TESTED" in text and "PASS" not in text and "nan" not in text
    assert code not in (0, 1, 2)


@pytest.fixture(scope="module")
def targets_share() -> dict[str, Any]:
    from tests.evals.target_once import of_the_target

    return of_the_target()


@pytest.fixture
def target_once(targets_share: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not depend on drafts is found once: it is half of such a command."""
    for name, found in targets_share.items():
        monkeypatch.setattr(f"evals.lossless.distribution.{name}", found)


@pytest.mark.slow
@pytest.mark.usefixtures("target_once")
@pytest.mark.thorough
def test_sampling_tests_open_places_and_states_its_power(specdec_command: Run, tmp_path: Path) -> None:
    code, text = specdec_command(*SAMPLED, "--output", "o.json")
    assert code == 0 and "PASS: output unchanged" in text
    assert "would have been found" in text and "greedy answers read" in text
    for arm in json.loads((tmp_path / "o.json").read_text())["sampled"]["arms"]:
        assert arm["degrees"] > 0 and len(arm["powers"]) == (7 if arm["k"] else 0)
        assert all(power["everywhere"] > 0.999 for power in arm["powers"])
        assert (arm["drafts"] > 0) == (arm["k"] > 0)


@pytest.mark.long  # `make test`: tests/evals/test_engine.py plants a wrong rule, a greedy answer has this exit code
@pytest.mark.usefixtures("target_once")
def test_a_lossy_distribution_fails(specdec_command: Run, altered: Callable[..., None]) -> None:
    altered(before=lambda one: dataclasses.replace(one, temperature=3 * one.temperature))
    code, text = specdec_command(*SAMPLED)
    assert code == 1 and "FAIL: speculation changes the output" in text


@pytest.mark.slow
@pytest.mark.thorough
def test_a_lossy_greedy_answer_fails(specdec_command: Run, altered: Callable[..., None]) -> None:
    altered(after=lambda done: dataclasses.replace(done, token_ids=[*done.token_ids[:5], 7, *done.token_ids[6:]]))
    code, text = specdec_command(*LOSSLESS, "--mode", "greedy")
    assert code == 1 and "FAIL: speculation changes the output" in text


@pytest.mark.slow
def test_equal_answers_without_a_draft_are_not_a_pass(specdec_command: Run) -> None:
    code, text = specdec_command(*LOSSLESS, "--mode", "greedy", "--max-new-tokens", "1")
    assert "NOT TESTED" in text and "PASS" not in text and code not in (0, 1, 2)


ACCEPTANCE = ("eval", "acceptance", *MODEL, "--limit", "3", "--k", "2", "--max-new-tokens", "20", "--warmup", "0")


@pytest.mark.slow
def test_acceptance_without_rounds_is_not_measured(specdec_command: Run, tmp_path: Path) -> None:
    code, text = specdec_command(*ACCEPTANCE, "--max-new-tokens", "1", "--output", "o.json")
    assert "NOT MEASURED" in text and code not in (0, 1, 2)
    assert "answers equal the target alone" not in text
    assert json.loads((tmp_path / "o.json").read_text())["not_measured"] == ["K=2"]


@pytest.mark.slow
def test_the_same_configuration_twice_says_so(specdec_command: Run) -> None:
    rest = ("--limit", "2", "--max-new-tokens", "10", "--warmup", "0")
    code, text = specdec_command("eval", "compare", "k=2", "k=2", *MODEL, *rest)
    assert code == 0 and "the same configuration" in text


@pytest.mark.slow
@pytest.mark.thorough
def test_accuracy_on_one_question_has_no_interval_and_no_p_value(specdec_command: Run) -> None:
    pytest.importorskip("lm_eval")
    arguments = ("--tasks", "specdec_arithmetic", "--limit", "1", "--device", "cpu", "--max-new-tokens", "60")
    code, text = specdec_command("eval", "gsm8k", *arguments)
    assert code == 0 and "none differs" in text and "τ" in text


@pytest.mark.slow
def test_accuracy_without_a_draft_is_not_tested(specdec_command: Run) -> None:
    pytest.importorskip("lm_eval")
    arguments = ("--tasks", "specdec_arithmetic", "--limit", "2", "--device", "cpu", "--max-new-tokens", "1")
    code, text = specdec_command("eval", "gsm8k", *arguments)
    assert "NOT TESTED" in text and code not in (0, 1, 2)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_second_run_in_the_same_folder_is_refused(
    specdec_command: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain, seen = specdec.SpeculativeModel.generate, list[tuple[int, str]]()

    def generate(self: Any, prompts: Any, params: Any = None) -> list[Any]:
        if not seen:
            seen.append((-1, ""))
            seen[0] = specdec_command(*ACCEPTANCE, "--run-dir", "run")
        return plain(self, prompts, params)

    monkeypatch.setattr(specdec.SpeculativeModel, "generate", generate)
    code, text = specdec_command(*ACCEPTANCE, "--run-dir", "run")
    assert code == 0, text
    assert seen[0][0] == 2 and "run is in use by another run" in seen[0][1] and "--run-dir" in seen[0][1]
    lines = (tmp_path / "run" / "answers.jsonl").read_text().splitlines()
    assert len(lines) == 3 * 2  # three questions, two configurations, each once
    assert specdec_command(*ACCEPTANCE, "--run-dir", "run")[0] == 0  # and when it has ended the folder is free


@pytest.mark.slow
@pytest.mark.parametrize("content", ["[]", *(pytest.param(c, marks=pytest.mark.slow) for c in ("not json", "\x00"))])
@pytest.mark.cases(1)
def test_a_damaged_settings_file_is_named(specdec_command: Run, tmp_path: Path, content: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.json").write_text(content)
    code, text = specdec_command(*ACCEPTANCE, "--run-dir", "run")
    assert code == 2 and "run/settings.json is damaged" in text and "--run-dir" in text


@pytest.mark.slow
@pytest.mark.thorough
def test_other_settings_are_shown_by_what_differs(specdec_command: Run) -> None:
    assert specdec_command(*ACCEPTANCE, "--run-dir", "run")[0] == 0
    code, text = specdec_command(*ACCEPTANCE, "--run-dir", "run", "--max-new-tokens", "21")
    error = next(line for line in text.splitlines() if line.startswith("Error"))
    assert code == 2 and "asking.params.max_new_tokens: 20 -> 21" in error
    assert "models" not in error and len(error) < 250


@pytest.mark.slow
@pytest.mark.thorough
def test_a_last_line_cut_off_is_dropped_and_said(specdec_command: Run, tmp_path: Path) -> None:
    assert specdec_command(*ACCEPTANCE, "--run-dir", "run")[0] == 0
    path = tmp_path / "run" / "answers.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.warns(UserWarning, match=r"answers\.jsonl:6: the last line was cut off"):
        code, _ = specdec_command(*ACCEPTANCE, "--run-dir", "run")
    lines = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    assert code == 0 and {(a["question_id"], a["arm"]) for a in lines} == {
        (str(i), arm) for i in range(3) for arm in ("target alone", "K=2")
    }


@pytest.mark.slow
@pytest.mark.thorough
def test_other_damage_of_a_run_is_named(specdec_command: Run, tmp_path: Path) -> None:
    assert specdec_command(*ACCEPTANCE, "--run-dir", "run")[0] == 0
    path = tmp_path / "run" / "answers.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    record = json.loads(first)
    record["answer"]["turns"][0]["token_ids"] = "abc"
    path.write_text("".join([json.dumps(record) + "\n", *rest]))
    code, text = specdec_command(*ACCEPTANCE, "--run-dir", "run")
    assert code == 2 and "answers.jsonl:1: damaged" in text


@pytest.mark.parametrize("option", ["--output", "--report", "--spec-bench-dir", "--run-dir"])
def test_an_output_that_cannot_be_made_is_said_before_the_run(
    specdec_command: Run, tmp_path: Path, option: str
) -> None:
    (tmp_path / "file").write_text("x")
    code, text = specdec_command(*ACCEPTANCE, option, "file/inside")
    assert code == 2 and "file/inside" in text and "Not a directory" in text
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def small_files() -> Iterator[Callable[[int], None]]:
    """No file of this process may grow beyond so many bytes: what a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
@pytest.mark.thorough
def test_no_room_for_answers_is_a_named_error(specdec_command: Run, small_files: Callable[[int], None]) -> None:
    small_files(5_000)
    code, text = specdec_command(*ACCEPTANCE, "--limit", "40", "--run-dir", "run")
    assert code == 2 and "cannot write run/answers.jsonl" in text and "goes on from there" in text
