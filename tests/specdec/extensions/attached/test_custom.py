"""custom_generate: the callable form, and a folder whose own `generate` speculates in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fakes import table_head
from transformers import GenerationConfig, LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TextIteratorStreamer
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from specdec.cli.main import cli
from specdec.errors import InvalidInputError, SpecdecWarning
from specdec.extensions.attached.custom import CustomGenerate, _of_config, custom_generate
from tests.specdec.extensions.attached.test_attach import CASES, MASK, PADDED, SIZES, Last, Letters, call, greedy, same
from tests.specdec.extensions.attached.test_served import peft_model

NOT_PREPARED = {"beginning of text"}
"""transformers prepares these for a callable in another way: a cache that needs a prompt."""


@pytest.fixture(scope="module")
def own(target: Any) -> Iterator[CustomGenerate]:
    made = custom_generate(table_head(target), num_speculative_tokens=3, **SIZES)
    yield made
    made.close()


@pytest.mark.parametrize("case", sorted(set(CASES) - NOT_PREPARED))
@pytest.mark.cases(1)
def test_the_callable_gives_what_transformers_gives(own: CustomGenerate, target: Any, case: str) -> None:
    found = call(target.generate, {**CASES[case], "custom_generate": own})
    same(found, call(target.generate, CASES[case]))
    assert own.wrapping(target).engine_stats.rounds > 0


def test_samples_repeat_by_torchs_seed(own: CustomGenerate, target: Any) -> None:
    options = {"do_sample": True, "top_k": 5, "num_return_sequences": 3, "custom_generate": own}
    found = call(target.generate, greedy(**options))
    assert found.tolist() == call(target.generate, greedy(**options)).tolist() and found.shape == (3, 21)


def test_samples_are_drawn_from_the_distribution_of_transformers(own: CustomGenerate, target: Any) -> None:
    """Temperature and filters are among the merged processors, and apply once."""
    case = greedy(do_sample=True, temperature=0.6, top_k=7, top_p=0.9, repetition_penalty=1.3, max_new_tokens=1)
    case |= {"return_dict_in_generate": True, "output_scores": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecdecWarning)
        found = call(target.generate, {**case, "custom_generate": own})
    torch.testing.assert_close(found.scores[0], call(target.generate, case).scores[0], rtol=0.0, atol=2e-5)


def test_streamers_and_stop_strings_are_the_objects(target: Any) -> None:
    streamer = TextIteratorStreamer(Letters(), skip_prompt=True, timeout=60)
    own = custom_generate(streamer=streamer, **SIZES)
    found = target.generate(**greedy(), custom_generate=own)
    assert "".join(streamer) == Letters().decode(found[0, 9:].tolist())
    own.close()


def test_a_processor_in_place_of_an_option_is_the_callers(own: CustomGenerate, target: Any) -> None:
    case = greedy(repetition_penalty=1.1, logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)]))
    with pytest.warns(Warning, match="RepetitionPenaltyLogitsProcessor is used in place"):
        found = call(target.generate, {**case, "custom_generate": own})
    same(found, call(target.generate, case))


def test_an_adapter_for_each_prompt_is_refused_by_name() -> None:
    model, own = peft_model(), custom_generate(**SIZES)
    with pytest.raises(InvalidInputError, match="peft's adapter_names: rounds have one adapter for all rows"):
        model.generate(input_ids=PADDED, adapter_names=["default", "other"], custom_generate=own)
    own.close()


def test_code_that_may_read_a_batch_is_refused(own: CustomGenerate, target: Any) -> None:
    case = greedy(inputs=PADDED, attention_mask=MASK, logits_processor=LogitsProcessorList([Last()]))
    with pytest.raises(InvalidInputError, match=r"Last: this code may read all 2 sequences.*specdec\.row_wise"):
        target.generate(**case, custom_generate=own)


def test_what_is_not_served_is_refused(own: CustomGenerate, target: Any) -> None:
    with pytest.raises(InvalidInputError, match="num_beams"):
        target.generate(**greedy(num_beams=2), custom_generate=own)


_FRESH = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, plain, prompt = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
inputs = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")
found = [model.generate(**inputs, max_new_tokens=n, do_sample=False)[0].tolist() for n in (24, 12)]
positional = model.generate(inputs["input_ids"], max_new_tokens=12, do_sample=False)[0].tolist()
other = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
right = [other.generate(**inputs, max_new_tokens=n, do_sample=False)[0].tolist() for n in (24, 12)]
own = {"max_new_tokens": 12, "do_sample": False, "custom_generate": folder, "trust_remote_code": True}
by_name, again = (other.generate(**inputs, **own) for _ in range(2))
assert again.tolist() == by_name.tolist()
stats = vars(model)["_specdec_attachment"].model.engine_stats
rounds, accepted = stats.rounds, found[0]
print(json.dumps([found, right, positional, by_name[0].tolist(), rounds]))
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_a_folder_speculates_by_itself(tmp_path: Path) -> None:
    out = tmp_path / "speculates"
    done = CliRunner().invoke(cli, ["export", "gsm-llama-eagle3", "--layout", "custom_generate", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "trust_remote_code=True).generate(…) speculates" in done.output
    assert (out / "custom_generate" / "requirements.txt").read_text().startswith("specdec-hf>=")
    plain = Path(__file__).resolve().parents[4] / "specdec" / "models" / "gsm-llama"
    text = "Question: Anna has 12 apples and buys 8 more. How many apples does she have?\nAnswer:"
    run = subprocess.run(
        [sys.executable, "-c", _FRESH, str(out), str(plain), text],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
    )
    found, right, positional, by_name, rounds = json.loads(run.stdout.splitlines()[-1])
    assert found == right and positional == by_name == right[1]
    assert 0 < rounds < 40  # of 48 tokens


def test_export_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    for arguments, words in (
        (["gsm-deepseek", "--layout", "custom_generate", "--out", str(tmp_path / "a")], "multi-token-prediction"),
        (
            ["gsm-llama-eagle3", "--layout", "custom_generate", "--target", "no/body", "--out", str(tmp_path / "b")],
            "its files are not on this machine",
        ),
        (
            ["gsm-llama-eagle3", "--layout", "custom_generate", "--verifier", "x", "--out", str(tmp_path / "c")],
            "only --layout speculators",
        ),
    ):
        done = CliRunner().invoke(cli, ["export", *arguments])
        assert done.exit_code != 0 and words in f"{done.output}{done.exception}"
    assert not any(tmp_path.iterdir())


def test_without_the_targets_files_only_the_folder_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["export", "gsm-llama-eagle3", "--layout", "custom_generate", "--without-target-tensors", "--out", str(out)]
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert [path.name for path in out.iterdir()] == ["custom_generate"]
    assert {path.name for path in (out / "custom_generate").iterdir()} == {"generate.py", "head", "requirements.txt"}


def test_which_criteria_are_those_of_the_config() -> None:
    """Others are the caller's own, and count: a shorter length, another time."""
    config = GenerationConfig(max_length=20, max_time=3.0)
    own = [MaxLengthCriteria(20), MaxLengthCriteria(21), MaxTimeCriteria(3.0), EosTokenCriteria([1])]
    others: list[Any] = [MaxLengthCriteria(19), MaxTimeCriteria(2.0), lambda ids, scores: False]
    assert [_of_config(one, config) for one in [*own, *others]] == [True] * 4 + [False] * 3
