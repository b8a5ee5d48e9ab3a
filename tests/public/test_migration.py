"""docs/how-to/migrate.md: the lines of its tables run; those of vLLM and EAGLE, which are not installed, do not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import specdec
from specdec.cli.main import cli
from specdec.loading.names import builtin_path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "migrate.md").read_text("utf-8")
ROWS = [
    (section, there, here)
    for section, text in re.findall(r"^## From (\S+).*?\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    for there, here in re.findall(r"^\| (`.*) \| (.*) \|$", text, re.M)
]
SLOW = "generate_batch"
"""Takes minutes in transformers on a CPU, for its cache; tests/specdec/extensions/attached compares at a small one."""
T, HEAD = str(builtin_path("gsm-llama")), str(builtin_path("gsm-llama-eagle3"))
ELLIPSES = {
    "stop=[…]": 'stop=["7"]',
    "model.stream(…)": "model.stream(ids, max_new_tokens=4)",
    "model.generate(…, ": "model.generate(ids, max_new_tokens=4, ",
    "stop_strings=[…]": 'stop_strings=["7"], tokenizer=tokenizer',
    "TextStreamer(…)": "TextStreamer(tokenizer)",
    "assistant_model=…": "assistant_model=assistant",
    "prompt_lookup_num_tokens=…": "prompt_lookup_num_tokens=3",
    "num_speculative_tokens=5": "num_speculative_tokens=5, draft=H",
    "max_new_tokens=100": "max_new_tokens=4",
    "max_new_tokens=512": "max_new_tokens=4",
}
"""What stands for "…" in a line, and shorter answers."""


def pieces(cell: str) -> list[str]:
    """The code in a cell, ready to run."""
    found = re.findall(r"`([^`]+)`", cell)
    for short, whole in ELLIPSES.items():
        found = [piece.replace(short, whole) for piece in found]
    return found


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    """What the lines name."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

    tokenizer = AutoTokenizer.from_pretrained(T)
    hf_models = [AutoModelForCausalLM.from_pretrained(T) for _ in range(3)]
    inputs = tokenizer("What is 3 + 4?", return_tensors="pt")
    with specdec.SpeculativeModel.from_pretrained(T) as by_name:
        dtype = by_name.dtype  # on a CPU without bfloat16 it is not the checkpoint's
    with specdec.SpeculativeModel.from_pretrained(hf_models[0], draft=HEAD, tokenizer=tokenizer) as model:
        found = {name: getattr(specdec, name) for name in specdec.__all__}
        found |= {"T": T, "H": HEAD, "HEAD": HEAD, "model": model, "specdec": specdec, "tokenizer": tokenizer}
        found |= {
            "hf_model": hf_models[1],
            "assistant": hf_models[2].to(dtype),
            "inputs": inputs,
            "TextStreamer": TextStreamer,
        }
        found |= {"AutoModelForCausalLM": AutoModelForCausalLM, "ids": inputs["input_ids"][0].tolist()}
        found |= {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "prompts": ["What is 3 + 4?"]}
        found["completion"] = model.generate("What is 3 + 4?", max_new_tokens=4)[0]
        found["output"] = hf_models[1].generate(**inputs, max_new_tokens=4)
        yield found | {"schema": {"type": "object"}}


def evaluated(code: str, names: dict[str, Any]) -> Any:
    found = eval(code, names)
    if isinstance(found, specdec.SpeculativeModel):
        found.close()
    return found


def attached(call: str, names: dict[str, Any]) -> Any:
    """A call of the transformers model inside of `attach`."""
    with specdec.attach(names["hf_model"], draft=HEAD):
        return evaluated(call, {**names, "model": names["hf_model"]})


@pytest.mark.slow
@pytest.mark.parametrize(("section", "there", "here"), ROWS)
@pytest.mark.thorough
def test_the_right_column_runs(
    section: str, there: str, here: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if here.startswith("the same, inside"):
        assert attached(pieces(there)[0], names) is not None
    elif here == "refused":
        with pytest.raises(specdec.InvalidInputError):
            attached(f"model.generate(**inputs, {pieces(there)[0]})", names)
    elif here == "the same":  # docs/how-to/several_gpus.md runs it
        assert there == "`tensor_parallel_size=2`"
    for code in pieces(here) if here.startswith(("`", "for")) else []:
        if code.startswith("for "):
            exec(f"{code}: pass", names)
        elif code.startswith("specdec "):
            words = code.replace("mt_bench", "arithmetic --limit 1 --max-new-tokens 8").split()[1:]
            done = CliRunner().invoke(cli, words if len(words) > 1 else [*words, "--help"])
            assert done.exit_code == 0, done.output
        elif code.startswith(("draft=", "num_speculative_tokens=")):
            target = "'gsm-deepseek'" if code == 'draft="mtp"' else "T"
            assert evaluated(f"SpeculativeModel.from_pretrained({target}, {code})", names)
        elif re.match(r"\w+=", code):
            assert evaluated(f"model.generate(ids, max_new_tokens=4, {code})", names)
        else:
            assert evaluated(code, names) is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    "there", [there for section, there, _ in ROWS if section == "model.generate" and SLOW not in there]
)
def test_the_left_column_runs_in_transformers(there: str, names: dict[str, Any]) -> None:
    names = {**names, "model": names["hf_model"]}
    for code in pieces(there):
        is_option = re.match(r"\w+=", code) is not None
        call = f"model.generate(**inputs, max_new_tokens=4, {code})" if is_option else code
        assert evaluated(call, names) is not None


def test_every_row_is_tried_or_named() -> None:
    assert len(ROWS) == PAGE.count("\n| `") and {section for section, _, _ in ROWS} == {
        "model.generate",
        "vLLM",
        "SafeAILab's",
    }
    assert PAGE.count("It was not run") == 2
