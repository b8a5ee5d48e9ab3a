"""The engine as an lm-eval model: scores in batches equal to `hf`'s, order, the cache of answers, the chat template."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

import evals.accuracy.lm_eval_model  # noqa: F401 - the one import that makes model="specdec" known
import specdec
from evals.accuracy import engine_lm
from evals.accuracy.accuracy import AccuracyPlan, _tasks, prepare
from evals.accuracy.engine_lm import EngineLM
from evals.data.datasets import DATA_VARIABLE
from evals.runs.conversations import Configuration
from specdec.errors import InvalidInputError
from specdec.loading.names import builtin_names, builtin_path
from specdec.model import SpeculativeModel

pytestmark = [
    pytest.mark.skipif("gsm-llama" not in builtin_names(), reason="no built-in target"),
    pytest.mark.usefixtures("unchecked"),
]
LENGTH = 256
SHOTS = "".join(f"Tom has {i} apples and buys {i + 1} more. He has {2 * i + 1} apples.\n" for i in range(1, 5))
TASK = """
task: specdec_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


@pytest.fixture(scope="module")
def model() -> Any:
    return specdec.SpeculativeModel.from_pretrained("gsm-llama", "auto", device="cpu", max_model_len=LENGTH)


@pytest.fixture
def lm(model: Any) -> EngineLM:
    return EngineLM(model, Configuration("x", 3), max_gen_toks=8)


class Told:
    """Stands for lm-eval's cache of answers: what it was told, in order; `most`: it is interrupted after so many."""

    def __init__(self, most: int = 99) -> None:
        self.seen: list[tuple[str, Any, Any]] = []
        self.most = most

    def add_partial(self, kind: str, key: Any, result: Any) -> None:
        self.seen.append((kind, key, result))
        if len(self.seen) == self.most:
            raise KeyboardInterrupt


def scoring(texts: list[tuple[str, ...]], kind: str = "loglikelihood") -> list[Instance]:
    return [Instance(kind, {}, each, i, ("task", i, 1)) for i, each in enumerate(texts)]


def choices(questions: int = 4) -> list[tuple[str, ...]]:
    """Several answers to several questions after the same examples, not in order."""
    asked = [f"{SHOTS}Anna has {i} apples and buys {i + 2} more. She has" for i in range(questions)]
    return [(question, f" {answer}") for answer in (3, 12, 20, 100) for question in asked]


def asking(context: str, index: int = 0, **gen_kwargs: Any) -> Instance:
    return Instance("generate_until", {}, (context, gen_kwargs), 0, ("task", index, 1))


def one_at_a_time(lm: EngineLM, requests: list[Instance]) -> list[tuple[float, bool]]:
    """As it was before there were batches: a forward of the model for each text."""
    pairs = [lm._encode_pair(*request.args) for request in requests]
    return [lm.scored_alone(context, own) for context, own in pairs]


@pytest.mark.slow
def test_scores_come_from_one_batch_with_shared_beginnings(
    lm: EngineLM, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[list[int]]] = []
    plain: Callable[..., Any] = model.score
    monkeypatch.setattr(model, "score", lambda p, c, logprobs: calls.append(p) or plain(p, c, logprobs=logprobs))
    asked = scoring(choices())
    right = one_at_a_time(lm, asked)
    monkeypatch.setattr(model, "own_logits", None)
    lm.cache_hook = told = Told()
    found = lm.loglikelihood(asked)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in right]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in right], abs=1e-4)
    assert [len(each) for each in calls] == [16] and calls[0] == sorted(calls[0])
    assert {key: score for _, key, score in told.seen} == {a.args: b for a, b in zip(asked, found, strict=True)}


@pytest.mark.slow
def test_an_interrupted_scoring_has_told_of_what_it_had(lm: EngineLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_lm, "_SCORED_AT_ONCE", 2)
    lm.cache_hook = told = Told(most=3)
    with pytest.raises(KeyboardInterrupt):
        lm.loglikelihood(scoring(choices(1)))
    assert [kind for kind, _, _ in told.seen] == ["loglikelihood"] * 3


@pytest.mark.slow
def test_long_texts_are_cut_as_hf_cuts_them(lm: EngineLM, model: Any) -> None:
    """Windows of one token more than a request can have, a context that is too long, and one token alone."""
    text = SHOTS * 8
    ids = lm.tok_encode(text)
    assert len(ids) > 2 * LENGTH
    lm.cache_hook = told = Told()
    total, short = lm.loglikelihood_rolling(scoring([(text,), ("Tom",)], "loglikelihood_rolling"))
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    stock = HFLM(pretrained=model.hf_model, tokenizer=model.tokenizer, max_length=LENGTH)
    assert [total, short] == pytest.approx(
        stock.loglikelihood_rolling(scoring([(text,), ("Tom",)], "loglikelihood_rolling")), abs=2e-3
    )
    assert [key for _, key, _ in told.seen] == [(text,), ("Tom",)]
    (cut,), (right,) = (each.loglikelihood(scoring([(text, " 12 apples")])) for each in (lm, stock))
    assert cut == (pytest.approx(right[0], abs=1e-4), right[1])
    with pytest.raises(InvalidInputError, match=rf"to be scored at once; max_length is {LENGTH}"):
        lm._loglikelihood_tokens([(None, [1], ids)])


@pytest.mark.slow
def test_requests_are_asked_together_by_gen_kwargs_and_answered_in_order(
    lm: EngineLM, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[tuple[int, float]]] = []
    plain = model.generate_iter
    monkeypatch.setattr(
        model,
        "generate_iter",
        lambda p, q: calls.append([(len(a), b.temperature) for a, b in zip(p, q, strict=True)]) or plain(p, q),
    )
    texts = ["Tom has", "Tom has 3 apples and", "How many apples", "One"]
    asked = [asking(text, i, **({"temperature": 2.0} if i % 2 else {"until": ["."]})) for i, text in enumerate(texts)]
    lm.cache_hook = told = Told()
    found = lm.generate_until(asked)
    ((*given,),) = calls
    assert [heat for _, heat in given] == [0.0, 0.0, 2.0, 2.0]
    assert given[0] > given[1] and given[2] > given[3]
    assert found == [lm.generate_until([each])[0] for each in asked]
    assert {(key[0], text) for _, key, text in told.seen} == set(zip(texts, found, strict=True))
    assert all(key[1] == {"until": ["."]} for _, key, _ in told.seen if key[0] in texts[::2])


@pytest.mark.slow
def test_an_answer_is_told_to_the_cache_as_it_finishes(lm: EngineLM) -> None:
    lm.cache_hook = told = Told(most=1)
    with pytest.raises(KeyboardInterrupt):
        lm.generate_until([asking(f"Tom has {i}", i, until=["."]) for i in range(3)])
    assert len(told.seen) == 1


def test_chat_template_and_thinking(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template += "{{ style }}{{ enable_thinking }}:{{ messages[0]['content'] }}"
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    given: dict[str, Any] = {"chat_template_args": {"style": "plain-"}, "think_end_token": "</think>"}
    lm = EngineLM(model, Configuration("x", 0), enable_thinking=True, **given)
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}]
    assert lm.apply_chat_template(chat) == "plain-True:hi"
    assert lm.chat_template(True) == template and lm.tokenizer_name.endswith("gsm-llama")
    assert (lm.rank, lm.world_size) == (0, 1)
    with pytest.raises(InvalidInputError, match=r"enable_thinking=True with tasks that score given texts \(task\)"):
        lm.loglikelihood(scoring([("a", " b")]))
    assert EngineLM(model, Configuration("x", 0), prefix_token_id=5).prefix_token_id == 5


@pytest.fixture
def tasks(tmp_path: Path) -> TaskManager:
    """A multiple-choice task of its own file."""
    rows = [
        {"question": text[0], "choices": [" 3", " 12", " 20", " 100"], "label": i % 4}
        for i, text in enumerate(choices(6)[:6])
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "choices.yaml").write_text(TASK.format(data=data))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gsm-llama", "gsm-deepseek"])
def test_a_task_of_choices_equals_stock_hf(
    tasks: TaskManager, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As both are used: `simple_evaluate(model=name, model_args=...)`."""
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    how: dict[str, Any] = {"tasks": ["specdec_choices"], "device": "cpu", "bootstrap_iters": 0, "task_manager": tasks}
    ours = lm_eval.simple_evaluate(
        model="specdec", model_args={"pretrained": name, "draft": "auto", "max_length": 512}, batch_size="auto", **how
    )
    stock = lm_eval.simple_evaluate(
        model="hf", model_args={"pretrained": str(builtin_path(name)), "dtype": "float32"}, batch_size=1, **how
    )
    assert ours["results"]["specdec_choices"]["acc,none"] == stock["results"]["specdec_choices"]["acc,none"]
    found, right = (told_of(each) for each in (ours, stock))
    assert len(found) == 24 and [greedy for _, greedy in found] == [greedy for _, greedy in right]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in right], abs=1e-4)


def told_of(result: Any) -> list[tuple[float, bool]]:
    """Scores of all choices, in order."""
    return [score[0] for row in result["samples"]["specdec_choices"] for score in row["resps"]]


@pytest.mark.long
@pytest.mark.skipif(not os.environ.get(DATA_VARIABLE), reason=f"{DATA_VARIABLE} is not set")
@pytest.mark.parametrize("name", ["gsm-llama", "gsm-deepseek"])
def test_gsm8k_equals_stock_hf_question_by_question(name: str) -> None:
    pytest.importorskip("accelerate")
    prepared = prepare(AccuracyPlan(("gsm8k",), 3, data_dir=Path(os.environ[DATA_VARIABLE]) / "gsm8k"))
    how: dict[str, Any] = {"limit": 3, "num_fewshot": 1, "device": "cpu", "bootstrap_iters": 0}
    results = []
    for kind, options in (
        ("specdec", {"pretrained": name, "draft": "auto", "max_length": 1024}),
        ("hf", {"pretrained": str(builtin_path(name)), "dtype": "float32"}),
    ):
        tasks = _tasks(prepared.plan)
        found = lm_eval.simple_evaluate(
            model=kind, model_args=options, tasks=tasks, task_manager=prepared.manager, **how
        )
        rows = found["samples"]["gsm8k"]
        results.append([(row["prompt_hash"], row["resps"], row["filter"], row["exact_match"]) for row in rows])
    assert len(results[0]) == 6 and results[0] == results[1]
    assert all(text for _, ((text,),), _, _ in results[0])


@pytest.mark.long
def test_batches_are_faster_than_one_at_a_time(lm: EngineLM, model: Any) -> None:
    asked = scoring(choices(8))
    model.engine.forget_prefixes()
    seconds = []
    for scored in (lm.loglikelihood, lambda requests: one_at_a_time(lm, requests)):
        start = time.perf_counter()
        scored(asked)
        seconds.append(time.perf_counter() - start)
    assert seconds[1] > 2 * seconds[0]


@pytest.mark.slow
@pytest.mark.thorough
def test_answers_follow_the_schemas_of_documents(caplog: pytest.LogCaptureFixture) -> None:
    """As jsonschema_bench has them, checked by its own metrics; one that cannot be followed is named."""
    pytest.importorskip("llguidance")
    from lm_eval.tasks.jsonschema_bench.metrics import json_validity, schema_compliance

    fields = {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer", "maximum": 99}}
    schemas = [
        json.dumps({"type": "object", "properties": dict(list(fields.items())[:n]), "required": ["name"]} | more)
        for n, more in ((1, {"additionalProperties": False}), (2, {"additionalProperties": False}), (2, {"not": {}}))
    ]
    asked = [
        Instance(
            "generate_until",
            {"json_schema": own},
            (f"JSON schema: {own}\n\nJSON object: ", {"until": []}),
            0,
            ("t", i, 1),
        )
        for i, own in enumerate(schemas)
    ]
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 640}
    with SpeculativeModel.from_pretrained("gsm-llama", "auto", device="cpu", **sizes) as model:
        lm = EngineLM(model, Configuration("specdec", 3), schema_field="json_schema", max_gen_toks=120)
        texts = lm.generate_until(asked)
        with pytest.raises(InvalidInputError, match="schema_field='other': documents of t have json_schema"):
            EngineLM(model, Configuration("specdec", 3), schema_field="other").generate_until(asked)
    right = [(own, text) for own, text in zip(schemas[:2], texts, strict=False)]
    assert [schema_compliance([own], [text]) and json_validity([own], [text]) for own, text in right] == [True, True]
    assert [r.message for r in caplog.records if "answered without its schema" in r.message and "not" in r.message]
