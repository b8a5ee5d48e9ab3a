"""`specdec train`: a used folder never passes an old head off as a new one, and a run survives whatever ends it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fakes import LETTERS, tiny_llama
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import SpeculativeModel
from specdec.errors import OutOfDeviceMemoryError
from specdec.extensions.training import run as plan
from specdec.extensions.training.run import TrainingPlan
from tests.mtp_cases import tiny

pytestmark = pytest.mark.usefixtures("short_evaluations")
PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
SCRIPT = EntryPoint("specdec", PROJECT["scripts"]["specdec"], "console_scripts")
"""Of this tree: an editable install keeps the metadata of its day."""
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
QUESTIONS = [f"how many apples has anna {n}" for n in range(12)]


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """All of it in one line: a narrow console wraps."""
        return " ".join((self.out + self.err).split())


def specdec(*arguments: object) -> Done:
    """Run the `specdec` command in this process. What is no clean exit is raised."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with streams[0], streams[1], patch.object(sys, "argv", ["specdec", *map(str, arguments)]):
        try:
            SCRIPT.load()()
        except SystemExit as end:
            code = end.code
    return Done(int(code or 0), out.getvalue(), err.getvalue())


def save_target(folder: Path, seed: int) -> Path:
    """A tiny random Llama with a tokenizer of one token a character."""
    tiny_llama(seed=seed).save_pretrained(save_tokenizer(folder))
    return folder


def save_tokenizer(folder: Path) -> Path:
    """One token a character."""
    vocab = {c: i for i, c in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with a multi-token-prediction module (tests/drafters/training/test_mtp.py trains the built-in)."""
    return tiny("deepseek_v3", context=0.03).write(save_tokenizer(tmp_path_factory.mktemp("deepseek")))


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("targets")
    return [save_target(folder / f"target-{seed}", seed) for seed in (0, 1)]


def questions(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"question": text}) + "\n" for text in texts), encoding="utf-8")
    return path


class Bench:
    """Commands that train for `target` on twelve questions."""

    def __init__(self, target: Path, folder: Path) -> None:
        self.target, self.folder = target, folder
        self.data = questions(folder / "questions.jsonl", QUESTIONS)
        self.output = folder / "run"

    def command(self, **changed: object) -> list[object]:
        options: dict[str, object] = {
            "model": self.target,
            "data": self.data,
            "output": self.output,
            "aux_layers": "1,2,3",
            "steps": 4,
            "batch_size": 3,
            "ttt_steps": 2,
            "held_out": 3,
            "max_new_tokens": 8,
            "max_length": 60,
            "device": "cpu",
            **changed,
        }
        named = {key.replace("_", "-"): value for key, value in options.items() if value is not None}
        flags = [f"--{key}" for key, value in named.items() if value is True]
        return ["train", "eagle3", *flags, *(x for k, v in named.items() if v is not True for x in (f"--{k}", v))]

    def train(self, **changed: object) -> Done:
        return specdec(*self.command(**changed))

    def head(self, output: Path | None = None) -> bytes:
        return ((output or self.output) / "head" / "model.safetensors").read_bytes()


@pytest.fixture
def bench(targets: list[Path], tmp_path: Path) -> Bench:
    return Bench(targets[0], tmp_path)


@pytest.fixture(scope="module")
def expected(targets: list[Path], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The head of a run that nothing disturbed."""
    undisturbed = Bench(targets[0], tmp_path_factory.mktemp("undisturbed"))
    assert undisturbed.train().code == 0
    return undisturbed.head()


def refused(done: Done) -> bool:
    """An error that is told, not a traceback."""
    return done.code == 2 and "Error: " in done.err and "Traceback" not in done.text


def results(folder: Path) -> list[Path]:
    """Files that a run left."""
    return [p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")] if folder.is_dir() else []


# --- what a run is -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.thorough
def test_other_data_in_a_used_folder_is_refused(bench: Bench, expected: bytes) -> None:
    assert bench.train().code == 0 and bench.head() == expected
    other = questions(bench.folder / "other.jsonl", [text.replace("apples", "pears") for text in QUESTIONS])
    done = bench.train(data=other)
    assert refused(done), f"exit {done.code}: the head of other data was passed off as this one's: {done.text}"
    assert "data: " in done.text and "questions.jsonl" in done.text and "other.jsonl" in done.text
    assert "--output" in done.text and "--overwrite" in done.text
    assert "learning_rate" not in done.text, "only what differs is shown"
    assert bench.head() == expected


@pytest.mark.slow
@pytest.mark.thorough
def test_another_target_in_a_used_folder_is_refused(bench: Bench, targets: list[Path], expected: bytes) -> None:
    assert bench.train().code == 0
    done = bench.train(model=targets[1])
    assert refused(done), f"exit {done.code}: the head of another target was passed off as this one's: {done.text}"
    assert "target: " in done.text and "target-0" in done.text and "target-1" in done.text
    assert "seed" not in done.text
    assert bench.head() == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_length", 50),
        *(
            pytest.param(*o, marks=pytest.mark.long)
            for o in (("aux_layers", "0,1,2"), ("held_out", 4), ("max_new_tokens", 9))
        ),
        pytest.param("learning_rate", 0.1, marks=pytest.mark.long),
    ],
)
@pytest.mark.thorough
def test_other_settings_in_a_used_folder_are_refused(bench: Bench, option: str, value: object, expected: bytes) -> None:
    assert bench.train().code == 0
    done = bench.train(**{option: value})
    assert refused(done), f"exit {done.code}: {done.text}"
    assert f"{option}: " in done.text and "->" in done.text
    assert bench.head() == expected


@pytest.mark.slow
def test_weights_changed_under_the_same_name_are_another_target(bench: Bench, targets: list[Path]) -> None:
    bench.target = Path(shutil.copytree(targets[0], bench.folder / "target"))
    assert bench.train().code == 0
    shutil.copy(targets[1] / "model.safetensors", bench.target / "model.safetensors")
    done = bench.train()
    assert refused(done) and "target: " in done.text


@pytest.mark.slow
def test_the_same_run_is_known_again_wherever_its_files_lie(bench: Bench, expected: bytes) -> None:
    assert bench.train().code == 0
    moved = shutil.copytree(bench.target, bench.folder / "moved")
    again = questions(bench.folder / "renamed.jsonl", QUESTIONS)
    with counting_prompts() as asked:
        done = bench.train(model=moved, data=again, max_num_seqs=2)
    assert done.code == 0 and bench.head() == expected
    assert sum(asked) == 0, "everything was answered and judged before"


@pytest.mark.slow
def test_overwrite_starts_anew(bench: Bench, expected: bytes) -> None:
    assert bench.train(seed=3).code == 0 and bench.head() != expected
    assert refused(bench.train())
    done = bench.train(overwrite=True)
    assert done.code == 0 and bench.head() == expected


def test_results_without_a_record_are_not_trusted(bench: Bench) -> None:
    (bench.output / "head").mkdir(parents=True)
    (bench.output / "head" / "model.safetensors").write_bytes(b"somebody's")
    done = bench.train()
    assert refused(done) and "holds head" in done.text
    assert bench.head() == b"somebody's"


# --- mistakes are found before the target answers ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"draft_vocab_size": 65}, "draft vocabulary 65 exceeds the target's 64"),
        ({"aux_layers": "1,2,9"}, "aux layers 0 … 3"),
        ({"held_out": 12}, "of 12 usable questions, 1 to 11 can be held out"),
        ({"max_length": 27}, "too long"),
        ({"ttt_steps": 8}, "8 drafts in a row (ttt_steps) need"),
        ({"learning_rate": "nan"}, "learning_rate must be positive and finite"),
        ({"seed": -1}, "seed"),
        ({"max_new_tokens": 1}, "max-new-tokens"),
        ({"max_num_seqs": 0}, "max-num-seqs"),
    ],
)
def test_mistakes_are_found_before_the_target_answers(bench: Bench, changed: dict[str, object], message: str) -> None:
    with counting_prompts() as asked:
        done = bench.train(**changed)
    assert refused(done), f"exit {done.code}: {done.text}"
    assert message in done.text
    assert sum(asked) == 0 and not results(bench.output), "the target answered first"


def test_an_output_inside_a_file_is_refused_at_once(bench: Bench) -> None:
    (bench.folder / "file").write_text("mine")
    with counting_prompts() as asked:
        done = bench.train(output=bench.folder / "file" / "run")
    assert refused(done) and "is a file" in done.text
    assert sum(asked) == 0 and (bench.folder / "file").read_text() == "mine"


def test_a_target_without_a_module_is_refused_at_once(bench: Bench) -> None:
    command = ["train", "mtp", "--model", bench.target, "--data", bench.data, "--output", bench.output]
    with counting_prompts() as asked:
        done = specdec(*command, "--held-out", 3, "--max-new-tokens", 8, "--ttt-steps", 2, "--device", "cpu")
    assert refused(done), f"exit {done.code}: {done.text}"
    assert sum(asked) == 0 and not results(bench.output)


# --- what the command says and gives back --------------------------------------------------------------------------


def test_the_kv_cache_is_given_back_before_training(bench: Bench) -> None:
    """The target that answered is closed when the first step is made; the answers, the plan and the weights stay."""
    plain, found = TrainingPlan.run, []

    def run(self: TrainingPlan[Any], *given: Any) -> Any:
        kept = [name for name in ("engine", "runners", "target") if name in vars(self.model)]
        found.append((kept, len(given[0])))
        return plain(self, *given)

    with patch.object(TrainingPlan, "run", run):
        done = bench.train()
    assert done.code == 0 and found == [([], 12)], done.text


@pytest.mark.slow
def test_a_speed_up_is_predicted_before_the_answers_and_with_each_measurement(bench: Bench, expected: bytes) -> None:
    with counting_prompts(0, lambda: print("the first answer")):
        done = bench.train()
    before, after = done.out.split("the first answer", 1)
    assert "a head that accepts 0.50 of 2 drafts breaks even" in before and "2: 1.33 ×" in before, done.text
    measured = re.search(r"step 4: .* \(τ (\S+), predicted speed-up (\S+) ×\)", after)
    assert measured is not None and float(measured[2]) == pytest.approx(float(measured[1]) / 1.5, abs=0.01)
    assert bench.head() == expected
    assert "breaks even" not in bench.train().out, "nothing is left to be trained"


@pytest.mark.slow
def test_a_gpu_without_room_for_the_measurement_can_still_be_trained_on(bench: Bench, expected: bytes) -> None:
    def no_room(*given: object) -> None:
        raise OutOfDeviceMemoryError("lower kv_cache_tokens")

    with patch.object(plan, "time_rounds", no_room):
        done = bench.train()
    assert done.code == 0 and "no speed-up can be predicted: lower kv_cache_tokens" in done.out
    assert "predicted speed-up" not in done.out and bench.head() == expected


@pytest.mark.slow
def test_patience_ends_a_run(bench: Bench) -> None:
    """Two steps of a tiny rate change nothing: the head of the first is as good as any."""
    done = bench.train(steps=9, learning_rate=1e-9, held_out_every=1, patience=1)
    assert done.code == 0 and "ended after step 2 of 9; kept is the best head, of step 1 " in done.out
    done = bench.train(steps=9, learning_rate=1e-9, held_out_every=1, patience=2)
    assert refused(done) and "patience: 1 -> 2" in done.text
    assert refused(bench.train(patience=0))


# --- what ends a run ---------------------------------------------------------------------------------------------


class Counted(contextlib.closing[Iterator[Any]]):
    """A generator as a stream: it closes at the end of a with-block."""

    def __iter__(self) -> Iterator[Any]:
        return self.thing


@contextlib.contextmanager
def counting_prompts(after: int | None = None, event: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """Yields how many prompts each call gave to the model; after so many finished answers, `event` happens."""
    plain, asked, finished = SpeculativeModel.stream, [], []

    def stream(self: SpeculativeModel, prompts: Any, params: Any = None) -> Iterator[Any]:
        asked.append(len(prompts))
        for update in plain(self, prompts, params):
            if len(finished) == after:
                event()
            yield update
            finished.extend([update] if update.completion is not None else [])

    with patch.object(SpeculativeModel, "stream", lambda *given: Counted(stream(*given))):
        yield asked


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def another_process(command: list[object], prepare: Callable[[], Any] = contextlib.nullcontext) -> Iterator[int]:
    """Run a command in a forked process (importing everything again would take long); killed at the end of the block.

    prepare: makes a context for the other process to run in.
    """
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            with prepare():
                status = specdec(*command).code
        finally:
            os._exit(status)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def ended(pid: int) -> int:
    """Wait for a process: its exit status, negative for the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.slow
def test_answers_outlive_a_killed_process(bench: Bench, expected: bytes) -> None:
    with another_process(bench.command(max_num_seqs=2), lambda: counting_prompts(5, kill)) as pid:
        assert ended(pid) == -signal.SIGKILL
    with counting_prompts() as asked:
        done = bench.train(max_num_seqs=2)
    assert done.code == 0, done.text
    assert asked[0] == 7, f"5 of 12 questions were answered before, {asked[0]} were asked again"
    assert bench.head() == expected


@pytest.mark.slow
def test_ctrl_c_says_what_is_kept(bench: Bench, expected: bytes) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with counting_prompts(5, interrupt):
        done = bench.train(max_num_seqs=2)
    assert done.code == 130, f"exit {done.code}: {done.text}"
    assert "interrupted; 5 answers are kept" in done.text and "Traceback" not in done.text
    with counting_prompts() as asked:
        assert bench.train(max_num_seqs=2).code == 0
    assert asked[0] == 7 and bench.head() == expected


@contextlib.contextmanager
def killed_at_rename(number: int) -> Iterator[None]:
    """The process is killed where it would rename a file or folder for the `number`th time."""
    plain, left = os.replace, iter(range(number - 1))

    def replace(*arguments: Any, **options: Any) -> None:
        if next(left, None) is None:
            kill()
        plain(*arguments, **options)

    with patch.object(os, "replace", replace):
        yield


@pytest.mark.long
def test_a_run_killed_while_writing_anything_ends_with_the_same_head(bench: Bench, expected: bytes) -> None:
    """Killed just before each rename in turn; what looks like a head is one, and the run goes on to the same bits."""
    killed = 0
    for number in range(1, 40):
        bench.output = bench.folder / f"run-{number}"
        command = bench.command(checkpoint_every=1)
        with another_process(command, lambda number=number: killed_at_rename(number)) as pid:  # type: ignore[misc]
            status = ended(pid)
        if status == 0:
            break
        assert status == -signal.SIGKILL
        killed += 1
        if (bench.output / "head").exists():
            assert bench.head() == expected
        done = bench.train(checkpoint_every=2)
        assert done.code == 0, f"killed at rename {number}: {done.text}"
        assert bench.head() == expected, f"killed at rename {number}"
    assert killed > 8


@pytest.mark.slow
@pytest.mark.parametrize("content", ["half", *(pytest.param(c, marks=pytest.mark.long) for c in ("[]", ""))])
@pytest.mark.thorough
def test_a_damaged_file_is_named_or_made_up_for(bench: Bench, content: str, expected: bytes) -> None:
    """Every file of a finished run in turn: the same head again, or an error; never a traceback, never another head."""
    assert bench.train(checkpoint_every=2).code == 0
    files = sorted(p.relative_to(bench.output) for p in results(bench.output))
    whole = shutil.copytree(bench.output, bench.folder / "whole")
    assert len(files) > 6
    for name in files:
        shutil.rmtree(bench.output)
        shutil.copytree(whole, bench.output)
        file = bench.output / name
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2] if content == "half" else content.encode())
        done = bench.train()
        if done.code == 0:
            assert bench.head() == expected, f"{name} with {content!r}"
        else:
            assert refused(done) and "damaged" in done.text, f"{name} with {content!r}: {done.text}"
        if name.name == "trainer.pt" and name.parent.name == "step-0000004":
            assert "step-0000004 is damaged" in done.text and "goes on from step-0000002" in done.text


@pytest.mark.slow
def test_when_no_checkpoint_is_good_the_run_does_not_start_anew_silently(bench: Bench, expected: bytes) -> None:
    assert bench.train().code == 0
    for state in bench.output.glob("step-*/*.pt"):
        state.write_bytes(state.read_bytes()[:100])
    done = bench.train()
    assert refused(done), done.text
    assert "every checkpoint is damaged" in done.text and "step-0000004" in done.text
    assert bench.train(overwrite=True).code == 0 and bench.head() == expected


@pytest.mark.slow
def test_a_second_process_is_kept_out_and_a_killed_one_forgotten(bench: Bench, expected: bytes) -> None:
    ready = bench.folder / "ready"

    def sleep() -> None:
        ready.touch()
        time.sleep(60)

    with another_process(bench.command(), lambda: counting_prompts(5, sleep)):
        while not ready.exists():
            time.sleep(0.01)
        done = bench.train()
        assert refused(done), f"exit {done.code}: two processes write into one folder: {done.text}"
        assert "in use by another run" in done.text and str(bench.output) in done.text.replace(" ", "")
    assert bench.train().code == 0 and bench.head() == expected


@pytest.mark.slow
@pytest.mark.thorough
def test_several_processes_answer_for_one_folder(bench: Bench) -> None:
    """Each its own file, at the same time; then one trains on all of them, and nothing is asked again."""
    ready, other = bench.folder / "ready", questions(bench.folder / "other.jsonl", ["how many pears has ben", "why"])

    def sleep() -> None:
        ready.touch()
        time.sleep(60)

    with another_process(bench.command(answers_only=True), lambda: counting_prompts(5, sleep)):
        while not ready.exists():
            time.sleep(0.01)
        assert bench.train(answers_only=True, data=other).code == 0
        assert refused(bench.train(answers_only=True)), "these questions are being answered"
    with counting_prompts() as asked:
        done = specdec(*bench.command(), "--data", other)
    assert done.code == 0 and asked[0] == 12 - 5, done.text


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file can become larger than `size` bytes: writing fails as on a full disk, without one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
@pytest.mark.parametrize("size", [20_000, *(pytest.param(size, marks=pytest.mark.long) for size in (200, 60_000))])
def test_a_full_disk_is_named_and_costs_nothing(bench: Bench, size: int, expected: bytes) -> None:
    """While a record, answers or a head are written."""
    with largest_file(size):
        done = bench.train()
    assert refused(done), f"exit {done.code}: {done.text}"
    assert "cannot write" in done.text
    assert not (bench.output / "head").exists()
    assert bench.train().code == 0 and bench.head() == expected


@pytest.mark.slow
@pytest.mark.thorough
def test_a_full_disk_leaves_the_last_checkpoint(bench: Bench, expected: bytes) -> None:
    with another_process(bench.command(checkpoint_every=2), lambda: killed_after_a_checkpoint(bench.output)) as pid:
        assert ended(pid) == -signal.SIGKILL
    with largest_file(20_000):
        done = bench.train(checkpoint_every=1)
    assert refused(done) and "the last good checkpoint is step-0000002" in done.text, done.text
    assert bench.train().code == 0 and bench.head() == expected


@contextlib.contextmanager
def killed_after_a_checkpoint(output: Path) -> Iterator[None]:
    """The process is killed when it would rename something and a checkpoint is there."""
    plain = os.replace

    def replace(*arguments: Any, **options: Any) -> None:
        if (output / "step-0000002").exists():
            kill()
        plain(*arguments, **options)

    with patch.object(os, "replace", replace):
        yield


@pytest.mark.slow
def test_the_interval_of_checkpoints_is_free(bench: Bench, expected: bytes) -> None:
    assert bench.train(checkpoint_every=1).code == 0
    assert sorted(p.name for p in bench.output.glob("step-*")) == ["step-0000003", "step-0000004"]
    assert bench.head() == expected
    assert bench.train(checkpoint_every=3).code == 0, "it does not change the result, so it may change"
    assert refused(bench.train(checkpoint_every=0))


@pytest.mark.slow
@pytest.mark.thorough
def test_modules_are_trained_under_the_same_rules(deepseek: Path, tmp_path: Path) -> None:
    data = questions(tmp_path / "questions.jsonl", [f"Anna has {n} apples and buys 8. How many?" for n in range(6)])
    sizes = "--steps 2 --batch-size 2 --held-out 2 --max-new-tokens 12 --ttt-steps 2 --device cpu --max-num-seqs 6"
    command = ["train", "mtp", "--model", deepseek, "--output", tmp_path / "run", *sizes.split()]
    head = tmp_path / "run" / "head" / "model.safetensors"
    assert specdec(*command, "--data", data).code == 0
    first = head.read_bytes()
    other = questions(tmp_path / "other.jsonl", [f"Ben has {n} pears and eats 2 of them. How many?" for n in range(6)])
    done = specdec(*command, "--data", other)
    assert refused(done) and "data: " in done.text, f"exit {done.code}: {done.text}"
    done = specdec(*command, "--data", data, "--mtp-feedback", "pre_norm")
    assert refused(done), f"exit {done.code}: {done.text}"
    assert head.read_bytes() == first
    assert specdec(*command, "--data", data).code == 0 and head.read_bytes() == first


@pytest.mark.slow
@pytest.mark.thorough
def test_an_exported_module_says_the_dtype_that_it_has(deepseek: Path, tmp_path: Path) -> None:
    """A module is trained in float32, also for a target in another dtype."""
    data = questions(tmp_path / "questions.jsonl", [f"Anna has {n} apples and buys 8. How many?" for n in range(4)])
    sizes = "--steps 1 --batch-size 2 --held-out 1 --max-new-tokens 4 --ttt-steps 2 --device cpu --dtype bfloat16"
    done = specdec("train", "mtp", "--model", deepseek, "--data", data, "--output", tmp_path / "run", *sizes.split())
    assert done.code == 0, done.text
    with safe_open(tmp_path / "run" / "head" / "model.safetensors", framework="pt") as weights:
        stored = {str(weights.get_tensor(name).dtype) for name in weights.keys()}  # noqa: SIM118 (not a dict)
    said = json.loads((tmp_path / "run" / "head" / "config.json").read_text())["dtype"]
    assert stored == {f"torch.{said}"}
