"""The commands `generate`, `inspect` and `train eagle3` with the built-in pair, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from drafters.eagle3.checkpoint import describe_eagle
from evals.data.arithmetic import problems
from specdec.cli.generate import generate, read_prompt_file
from specdec.cli.inspect import inspect
from specdec.cli.tables import percentages, stats_table
from specdec.cli.train import train
from specdec.errors import InvalidInputError
from specdec.loading.heads import target_facts
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import RequestStats
from specdec.wrapped.probing import probe_target
from tests.specdec.extensions.completions import completion

QUESTION = "Tom has 3 boxes with 12 eggs in each box. How many eggs does Tom have now?"
CPU = ["--device", "cpu", "--max-new-tokens", "40"]


@pytest.fixture(scope="module")
def model() -> SpeculativeModel:
    return SpeculativeModel.from_pretrained("gsm-llama", device="cpu")


@pytest.fixture(scope="module")
def expected(model: SpeculativeModel) -> Any:
    """The target alone."""
    return model.generate([{"role": "user", "content": QUESTION}], SamplingParams(max_new_tokens=40))[0]


def run(arguments: list[str], **options: Any) -> Result:
    return CliRunner().invoke(generate, [*arguments, *CPU], **options)


@pytest.mark.slow
@pytest.mark.thorough
def test_generate_prints_the_answer_and_nothing_else(expected: Any) -> None:
    result = run([QUESTION, "--stats"])
    assert result.exit_code == 0
    assert result.stdout == expected.text + "\n"
    assert "acceptance length" in result.stderr and "Loading" not in result.stderr
    assert "attention of the target" in result.stderr and "torch reference" in result.stderr


@pytest.mark.slow
def test_generate_reads_standard_input_and_prints_json(expected: Any) -> None:
    record = json.loads(run(["--json"], input=QUESTION + "\n").stdout)
    assert (record["text"], record["token_ids"]) == (expected.text, expected.token_ids)
    assert record["prompt_token_ids"] == expected.prompt_token_ids and record["tau"] > 1


@pytest.mark.slow
def test_generate_reads_every_kind_of_line(expected: Any, tmp_path: Path) -> None:
    lines = [{"question": QUESTION}, {"prompt": QUESTION}, {"messages": [{"role": "user", "content": QUESTION}]}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    records = [json.loads(line) for line in run(["--json", "--file", str(file)]).stdout.splitlines()]
    assert [r["token_ids"] for r in records] == [expected.token_ids] * 3
    assert run(["--file", str(file)]).stdout.count(expected.text) == 3


@pytest.mark.slow
@pytest.mark.thorough
def test_objects_come_as_prompts_end_with_the_ids_of_their_lines(tmp_path: Path, monkeypatch: Any) -> None:
    """Into a new file as well, beside a bar on a terminal."""
    monkeypatch.chdir(tmp_path)
    lines = [{"prompt": "Count: 1 2 3", "id": "long"}, {"prompt": QUESTION, "id": 7}, {"question": QUESTION}]
    Path("p.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    done = run(["--file", "p.jsonl", "--output", "out.jsonl", "--stats", "--stop", "36>>"], catch_exceptions=False)
    assert done.exit_code == 0 and done.stdout == "" and "acceptance length" in done.stderr
    written = [json.loads(line) for line in Path("out.jsonl").read_text("utf-8").splitlines()]
    assert sorted(r["index"] for r in written) == [0, 1, 2]
    assert {r["index"]: r.get("id") for r in written} == {0: "long", 1: 7, 2: None}
    lengths = [len(r["token_ids"]) for r in written]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1], "the shorter ones end first"
    printed = [json.loads(line) for line in run(["--file", "p.jsonl", "--json", "--stop", "36>>"]).stdout.splitlines()]
    assert [(r["index"], r["text"]) for r in printed] == [(r["index"], r["text"]) for r in written]


@pytest.mark.parametrize(
    ("output", "message"), [("there", "exists; give another name"), ("no/x", "there is no folder")]
)
def test_a_file_is_not_overwritten(output: str, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").write_text("mine")
    with pytest.raises(InvalidInputError, match=message):
        run(["hi", "--output", output, "--model", "no-such-model"], catch_exceptions=False)
    assert Path("there").read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "message"), [("{", "line 1: not JSON"), ('\n{"text": "x"}', "line 2: no field of messages, prompt")]
)
def test_a_bad_line_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInputError, match=message):
        run(["--file", str(tmp_path / "p.jsonl")], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--file", __file__], "give one of them"),
        ([], "the prompt is empty"),
    ],
)
def test_a_missing_prompt_is_said_before_anything_is_loaded(arguments: list[str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        run([*arguments, "--model", "no-such-model"], catch_exceptions=False)


@pytest.mark.slow
def test_inspect_says_where_every_field_of_the_head_is_from(model: SpeculativeModel) -> None:
    result = CliRunner().invoke(inspect, ["--device", "cpu"], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and "self_test_error" in result.stdout
    folder = Path(model.hf_model.name_or_path).with_name("gsm-llama-eagle3")
    report = describe_eagle(folder, target_facts(probe_target(model.hf_model)))
    shown = ["".join(line.split("│")).split() for line in result.stdout.splitlines()]
    for field in report.fields:
        assert any(words[:1] == [field.name] for words in shown), field.name
    assert "lm_head.weight present" in result.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("short_evaluations")
@pytest.mark.thorough
def test_train_eagle3_makes_a_head_that_loads(model: SpeculativeModel, tmp_path: Path) -> None:
    questions = [json.dumps({"question": problem.question}) for problem in problems("train", 5, seed=7)]
    (tmp_path / "q.jsonl").write_text("\n".join(questions), encoding="utf-8")
    arguments = ["eagle3", "--data", str(tmp_path / "q.jsonl"), "--output", str(tmp_path / "run"), "--device", "cpu"]
    sizes = ["--draft-vocab-size", "256", "--intermediate-size", "64", "--steps", "2", "--batch-size", "2"]
    result = CliRunner().invoke(train, [*arguments, *sizes, "--held-out", "1"], catch_exceptions=False)
    assert result.exit_code == 0 and "the head is in" in result.stdout and "step 2: loss" in result.stdout
    trained = SpeculativeModel.from_pretrained(model.hf_model, tmp_path / "run" / "head", tokenizer=model.tokenizer)
    assert trained.head is not None and trained.head.draft_vocab_size == 256
    chat, params = [{"role": "user", "content": QUESTION}], SamplingParams(max_new_tokens=20)
    assert trained.generate(chat, params)[0].token_ids == model.generate(chat, params)[0].token_ids


def test_statistics_without_a_number_have_a_dash() -> None:
    """No round, or drafts that no round reached: never "nan%"."""
    assert percentages((0.5, float("nan"))) == "50%  –"
    made = stats_table([completion("a", token_ids=[1], stats=RequestStats())])
    shown = [str(cell) for column in made.columns for cell in column._cells]
    assert "–" in shown and not any("nan" in cell for cell in shown)


def test_a_byte_order_mark_and_fields_that_are_null(tmp_path: Path) -> None:
    file, text = tmp_path / "p.jsonl", tmp_path / "p.txt"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": null, "question": "a"}\n{"messages": null, "prompt": "b"}\n')
    text.write_bytes(b"\xef\xbb\xbf" + b"abc\n")
    found = [[line.prompt for line in read_prompt_file(each)] for each in (file, text)]
    assert found == [["a", "b"], ["abc"]]
