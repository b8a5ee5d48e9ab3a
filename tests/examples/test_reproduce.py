"""The scripts of published settings, dry: the very commands they give are run, with tiny stand-ins, in one process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from transformers import LlamaForCausalLM

from specdec.cli.main import cli
from specdec.loading.names import builtin_names
from specdec.options import LoadOptions

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "reproduce"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.sh") if path.name != "common.sh")
Command = list[str]
pytestmark = [
    pytest.mark.skipif("gsm-llama" not in builtin_names(), reason="needs the built-in models"),
    pytest.mark.usefixtures("unchecked"),
]

RECORD = f"""#!{sys.executable} -S
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., tuple[list[Command], subprocess.CompletedProcess[str]]]:
    """Run a script with programs in place of `specdec` and `python` that only note what they were asked."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("specdec", "python"):
        (programs / name).write_text(RECORD)
        (programs / name).chmod(0o755)

    def run(script: str, **variables: str) -> tuple[list[Command], subprocess.CompletedProcess[str]]:
        kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        environment = {**kept, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", **variables}
        environment |= {"RECORD": str(tmp_path / "record"), "OUT": str(tmp_path / "out")}
        done = subprocess.run(
            ["bash", str(FOLDER / script)], env=environment, capture_output=True, text=True, check=False
        )
        noted = (tmp_path / "record").read_text().splitlines() if (tmp_path / "record").exists() else []
        (tmp_path / "record").unlink(missing_ok=True)
        return [json.loads(line) for line in noted], done

    return run


def program(path: str) -> click.Command:
    """The command of a Python file of the folder."""
    spec = spec_from_file_location(f"reproduce_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.main


def invoke(command: Command) -> Result:
    """Run one noted command in this process."""
    name, *arguments = command
    main = cli if name == "specdec" else program(arguments.pop(0))
    return CliRunner().invoke(main, arguments)


def replay(commands: Sequence[Command]) -> None:
    """Run commands in their order; each must succeed."""
    for command in commands:
        done = invoke(command)
        assert done.exit_code == 0, (command, done.output, done.exception)


def documents(folder: Path) -> dict[str, Any]:
    """What the commands wrote, by file name."""
    return {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.fixture
def rehearse(record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Dry-run a script whole; returns the documents it wrote."""

    def run(script: str) -> dict[str, Any]:
        commands, done = record(script, DRY_RUN="1")
        assert done.returncode == 0 and commands, done.stderr
        monkeypatch.setenv("SPECDEC_DATA", str(tmp_path / "out" / "stand-in" / "data"))
        replay(commands)
        return documents(tmp_path / "out")

    return run


def shape(command: Command) -> list[str]:
    """A command without the values of its options: what it does, and not with which model or how much of it."""
    loads = {"--tensor-parallel-size", "--dtype", "--device"}
    names = [word for word in command if word.startswith("--") and word not in loads]
    words = command[:3] if command[0] == "specdec" else [Path(command[1]).name]
    return [*(word for word in words if not word.startswith("--")), *names]


def read_words(command: Command) -> None:
    """Let click read a command line; it fails where a command or an option does not exist or a value is not allowed."""
    name, *arguments = command
    entry: click.Command = cli
    if name != "specdec":
        entry = program(arguments.pop(0))
    while isinstance(entry, click.Group):
        found = entry.get_command(click.Context(entry), arguments.pop(0))
        assert found is not None, command
        entry = found
    entry.make_context(name, arguments)


@pytest.fixture
def real(record: Any, tmp_path: Path) -> Callable[[str], list[Command]]:
    """The commands of a script as it is for a user, who has data and allows what has to be allowed."""
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "spec_bench").mkdir()
    for file in ("gsm8k/train", "gsm8k/test", "spec_bench/question"):
        (tmp_path / f"{file}.jsonl").touch()

    def run(script: str) -> list[Command]:
        given = {"SPECDEC_DATA": str(tmp_path), "TRAIN_DATA": "code.jsonl", "CONFIRM_UNSAFE_CODE": "1"}
        commands, done = record(script, **given)
        assert done.returncode == 0, done.stderr
        return commands

    return run


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.cases(1)
def test_a_dry_run_has_the_commands_of_the_real_one(record: Any, real: Any, script: str) -> None:
    commands = real(script)
    (stand_in, *dry), done = record(script, DRY_RUN="1")
    assert done.returncode == 0 and Path(stand_in[1]).name == "stand_in.py"
    assert [shape(each) for each in dry] == [shape(each) for each in commands] and len(dry) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.cases(1)
def test_every_command_of_a_real_run_can_be_read(
    real: Any, tmp_path: Path, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands refuse files that are not there as they are read: what is given, and what earlier commands have made."""
    (tmp_path / "document.json").touch()
    (tmp_path / "code.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    known = "tensor_parallel_size" in {each.name for each in fields(LoadOptions)}
    for command in real(script):
        if Path(command[1]).name == "published.py":  # reads what the commands before it wrote
            command[2] = str(tmp_path / "document.json")
        if "--tensor-parallel-size" in command and not known:
            at = command.index("--tensor-parallel-size")
            assert command[at + 1] == "4"
            del command[at : at + 2]
        for option, value in pairwise(command):
            if option == "--draft" and Path(value).is_absolute():
                Path(value).mkdir(parents=True, exist_ok=True)
        read_words(command)


def test_a_command_that_does_not_exist_is_found() -> None:
    with pytest.raises(click.UsageError, match="No such option"):
        read_words(["specdec", "eval", "lossless", "--data", "gsm8k", "--tests", "3"])
    with pytest.raises(click.BadParameter):
        read_words(["specdec", "eval", "lossless", "--data", "gsm8k", "--k", "0"])


@pytest.mark.parametrize(
    "script, lacks",
    [
        ("mamba-codestral-7b-humaneval.sh", "TRAIN_DATA"),
        ("deepseek-v2-lite-chat.sh", "SPECDEC_DATA"),
        ("llama-3.2-3b-256-128.sh", "SPECDEC_DATA"),
        ("deepseek-r1-mtp-tp4.sh", "SPECDEC_DATA"),
    ],
)
def test_what_a_script_needs_is_said_before_anything_runs(record: Any, script: str, lacks: str) -> None:
    commands, done = record(script)
    assert (commands, done.returncode) == ([], 2) and lacks in done.stderr


def test_code_of_a_model_runs_only_where_it_is_allowed(record: Any) -> None:
    commands, done = record("mamba-codestral-7b-humaneval.sh", TRAIN_DATA="code.jsonl")
    assert (commands, done.returncode) == ([], 2) and "CONFIRM_UNSAFE_CODE" in done.stderr


@pytest.mark.slow
@pytest.mark.thorough
def test_deepseek_r1_dry(rehearse: Any) -> None:
    found = rehearse("deepseek-r1-mtp-tp4.sh")
    assert found["lossless.json"]["verdict"] == "PASS"
    assert [each["k"] for each in found["long-rows.json"]["measured"]] == [0, 1]
    assert found["long-rows.json"]["prompt_tokens"] + found["long-rows.json"]["new_tokens"] == 256


@pytest.mark.long
def test_llama_8b_dry(rehearse: Any) -> None:
    found = rehearse("llama-3.1-8b-eagle3.sh")
    assert found["lossless.json"]["verdict"] == "PASS"
    assert {f"{data}-temperature-{t}.json" for data in ("mt_bench", "gsm8k", "humaneval") for t in (0, 1)} < set(found)
    arm = found["gsm8k-temperature-0.json"]["arms"][-1]
    assert arm["name"] == "K=7" and arm["metrics"]["tau"]["estimate"] > 1


@pytest.mark.long
def test_deepseek_v2_lite_dry(rehearse: Any) -> None:
    found = rehearse("deepseek-v2-lite-chat.sh")
    assert found["own-tokens.json"]["verdict"] == found["lossless.json"]["verdict"] == "PASS"
    assert found["gsm8k-accuracy.json"]["identical"]["identical"] == 2


@pytest.mark.long
def test_mamba_codestral_dry(rehearse: Any) -> None:
    found = rehearse("mamba-codestral-7b-humaneval.sh")
    assert found["lossless.json"]["verdict"] == "PASS"
    assert found["humaneval.json"]["identical"]["identical"] == 2


@pytest.mark.long
def test_llama_3b_dry(rehearse: Any) -> None:
    found = rehearse("llama-3.2-3b-256-128.sh")
    assert [(each["rows"], each["k"]) for each in found["256-32.json"]["measured"]] == [(1, 0), (1, 3), (2, 0), (2, 3)]
    assert all(each["identical"] == each["rows"] for each in found["256-32.json"]["measured"])


@pytest.mark.parametrize(
    "measured, options, code",
    [(2.4, (), 0), (2.3, (), 1), (2.3, ("--other-setting", "a tree"), 0), (2.3, ("--floor", "0"), 0), (None, (), 1)],
)
def test_a_number_below_the_published_one_fails(tmp_path: Path, measured: Any, options: Any, code: int) -> None:
    arm = {
        "name": "K=3",
        "metrics": {"tau_vllm": {"estimate": measured}},
        "timing": {},
        "per_position_vllm": [{"estimate": p} for p in (0.7, 0.5)],
    }
    document = tmp_path / "a.json"
    document.write_text(json.dumps({"arms": [arm]}))
    asked = ["python", str(FOLDER / "published.py"), str(document), "--arm", "K=3", "--source", "them"]
    done = invoke([*asked, "--metric", "tau_vllm", "--value", "2.6", *options])
    assert done.exit_code == code, done.output
    assert invoke([*asked, "--metric", "position_2", "--value", "0.5"]).exit_code == 0
    assert invoke([*asked, "--metric", "position_3", "--value", "0.1"]).exit_code == 1, "there is no third position"


@pytest.mark.slow
@pytest.mark.thorough
def test_other_tokens_than_transformers_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """own_tokens fails once transformers' own answer is another one."""
    invoke(["python", str(FOLDER / "stand_in.py"), str(tmp_path)])
    monkeypatch.setenv("SPECDEC_DATA", str(tmp_path / "data"))
    path = str(FOLDER / "own_tokens.py")
    sizes = ["--data", "gsm8k", "--limit", "1", "--new-tokens", "8"]
    command = [
        "python",
        path,
        "--model",
        "gsm-llama",
        "--draft",
        "none",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        *sizes,
    ]
    done = invoke(command)
    assert done.exit_code == 0 and "1 of 1 identical" in done.output, done.output
    generate = LlamaForCausalLM.generate

    def planted(*given: Any, **more: Any) -> Any:
        ids = generate(*given, **more)
        ids[0, -3] += 1
        return ids

    monkeypatch.setattr(LlamaForCausalLM, "generate", planted)
    done = invoke(command)
    assert done.exit_code == 1 and "FAIL: 0 of 1 identical, 0 near ties" in done.output, done.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options, said",
    [
        ("fixed_lengths.py", ("--prompt-tokens", "999999"), "a prompt needs 999999; give a longer set"),
        ("own_tokens.py", ("--dtype", "int7"), "dtype"),
    ],
)
@pytest.mark.cases(1)
def test_bad_input_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: Any, said: str
) -> None:
    invoke(["python", str(FOLDER / "stand_in.py"), str(tmp_path)])
    monkeypatch.setenv("SPECDEC_DATA", str(tmp_path / "data"))
    asked = ["--model", "gsm-llama", "--draft", "none", "--device", "cpu", "--data", "gsm8k", "--new-tokens", "4"]
    done = invoke(["python", str(FOLDER / name), *asked, *options])
    assert done.exit_code == 2 and said in done.output and "Traceback" not in done.output, done.output


def test_the_page_names_every_script() -> None:
    page = (ROOT / "docs" / "reproduce.md").read_text("utf-8")
    assert sorted(set(re.findall(r"examples/reproduce/([\w.-]+\.sh)", page)) - {"common.sh"}) == SCRIPTS
    assert all(os.access(FOLDER / script, os.X_OK) for script in SCRIPTS)
