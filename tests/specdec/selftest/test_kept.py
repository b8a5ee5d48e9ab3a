"""Verdicts of self-tests that are kept: which starts test again, and that no change is covered by an older verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fakes import VOCAB, LetterTokenizer, tiny_llama
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import specdec.loading.assembly
import specdec.loading.parts
import specdec.selftest.kept
from attention.backends.reference import TorchBackend
from specdec import SpeculativeModel
from specdec.errors import UnsupportedModelError
from specdec.loading.parts import fingerprint_of
from specdec.selftest.kept import SelfTest, _own_code, fingerprint, self_test_of
from specdec.selftest.twin import TwinReport

_keyed = fingerprint_of  # before the tests' fixture replaces it
ROOT = Path(__file__).resolve().parents[3]
SIZES: dict[str, Any] = {"max_num_seqs": 2, "page_size": 4, "kv_cache_tokens": 400, "max_model_len": 100}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Verdicts are kept in this folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(specdec.loading.parts, "fingerprint_of", _keyed)
    return tmp_path / "cache" / "specdec" / "self-tests"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "model")
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which tests ran, by name, in order; none of them computes anything."""
    ran: list[str] = []

    def small(*_: Any) -> TwinReport:
        ran.append("twin")
        return TwinReport(())

    def whole(target: Any, probed: Any, longest: int, report: TwinReport, quick: bool = False) -> float:
        ran.append("quick" if quick else "full")
        return 1e-6

    with patch.multiple(specdec.loading.assembly, twin_test=small, check_target=whole):
        yield ran


def load(target: Any, draft: Any = None, **options: Any) -> SpeculativeModel:
    return SpeculativeModel.from_pretrained(target, draft, **SIZES | options)


def starts_test(folder: Any, tested: list[str], draft: Any = None, **options: Any) -> bool:
    """Whether one more start tests."""
    tested.clear()
    load(folder, draft, **options).close()
    return bool(tested)


def test_a_second_start_tests_nothing_and_knows_the_same(folder: Path, kept: Path, tested: list[str]) -> None:
    first = load(folder)
    assert tested == ["twin", "full"] and str(first.self_test) == "full"
    second = load(folder)
    assert tested == ["twin", "full"] and second.describe()["self_test"] == "none, by an earlier start's verdict"
    assert (second.self_test_error, str(second.twin)) == (first.self_test_error, str(first.twin))


def test_full_always_tests_and_quick_keeps_nothing(folder: Path, kept: Path, tested: list[str]) -> None:
    load(folder, self_test="quick")
    assert tested == ["twin", "quick"] and not kept.exists()
    assert starts_test(folder, tested), "a quick verdict does not stand for a full one"
    assert starts_test(folder, tested, self_test="full") and tested == ["twin", "full"]
    assert not starts_test(folder, tested)
    assert starts_test(folder, tested, self_test="quick") and tested == ["twin", "quick"]


def test_a_loaded_model_is_tested_at_every_start(kept: Path, tested: list[str]) -> None:
    """Whatever was done to it, no file says."""
    model, tokenizer = tiny_llama(), LetterTokenizer()
    for _ in range(2):
        assert starts_test(model, tested, tokenizer=tokenizer) and not kept.exists()


def test_a_loaded_model_with_a_name_is_tested_at_every_start(folder: Path, kept: Path, tested: list[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert starts_test(model, tested) and starts_test(model, tested) and not kept.exists()


def test_a_target_with_code_of_its_own_is_tested_at_every_start(folder: Path, kept: Path, tested: list[str]) -> None:
    assert starts_test(folder, tested, trust_remote_code=True) and not kept.exists()


def test_a_verdict_that_came_with_a_warning_is_not_kept(folder: Path, kept: Path) -> None:
    with (
        patch.object(specdec.loading.assembly, "twin_test", lambda *_: TwinReport((), "no room")),
        patch.object(specdec.loading.assembly, "check_target", lambda *_: 0.0),
    ):
        load(folder)
    assert not kept.exists()


def test_a_model_that_changes_itself_in_forwards_is_tested_at_every_start(
    folder: Path, kept: Path, tested: list[str]
) -> None:
    """Which settings forwards change is found out by the self-test, and decides whether prefixes stay valid."""

    def counting(target: Any, *_: Any) -> float:
        target.hf_model.model.calls = 1
        return 0.0

    with patch.object(specdec.loading.assembly, "check_target", counting):
        load(folder)
    assert not kept.exists()


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"page_size": 8},
        {"max_model_len": 60},
        {"num_speculative_tokens": 3, "draft": "lookup"},
        {"kv_cache_dtype": "fp8"},
        {"backend": "torch"},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_another_option_is_tested(folder: Path, kept: Path, tested: list[str], options: dict[str, Any]) -> None:
    assert starts_test(folder, tested)
    assert starts_test(folder, tested, **options)
    assert not starts_test(folder, tested), "the first verdict still holds"


def test_an_option_that_no_test_depends_on_is_not(folder: Path, kept: Path, tested: list[str]) -> None:
    assert starts_test(folder, tested)
    assert not starts_test(folder, tested, seed=7, max_waiting_requests=9)


def changed_value(folder: Path) -> None:
    file = folder / "model.safetensors"
    times = os.stat(file)
    tensors = load_file(file)
    tensors["model.layers.2.mlp.up_proj.weight"][0, 0] += 1.0  # one of the sampled places
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def rewritten(folder: Path) -> None:
    """Not one of the sampled places: the file's time tells."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][1, 3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})


def configured(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-3}))


@pytest.mark.parametrize("change", [changed_value, rewritten, configured])
def test_another_checkpoint_is_tested(
    folder: Path, kept: Path, tested: list[str], change: Callable[[Path], None]
) -> None:
    assert starts_test(folder, tested)
    change(folder)
    assert starts_test(folder, tested)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_OWN_CODE", "another"),
        ("version_of", lambda name: "9.9"),
        ("sys.version", "3.99.0"),
        ("torch.__config__.show", lambda: "another CPU"),
    ],
)
def test_other_code_and_another_machine_are_tested(
    folder: Path, kept: Path, tested: list[str], monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    assert starts_test(folder, tested)
    monkeypatch.setattr(f"specdec.selftest.kept.{name}", value)
    assert starts_test(folder, tested)


def test_the_code_is_that_of_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specdec.selftest.kept, "ROOT", tmp_path)
    found = {_own_code()}
    for package in ("attention", "drafters", "specdec"):
        file = tmp_path / package / "deep" / "one.py"
        file.parent.mkdir(parents=True)
        for text in ("x = 1", "x = 2"):
            file.write_text(text)
            found.add(_own_code())
    file.rename(file.with_name("two.py"))
    assert len(found | {_own_code()}) == 8


def test_functions_put_into_the_models_classes_are_tested(
    folder: Path, kept: Path, tested: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As libraries do that replace transformers' layers by faster ones before a model is loaded."""
    from transformers.models.llama import modeling_llama

    assert starts_test(folder, tested)
    right = modeling_llama.LlamaMLP.forward
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: right(self, x) * 1.001)
    assert starts_test(folder, tested)
    monkeypatch.undo()


def test_other_code_of_a_function_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even in the same lines, and inside of an inner function."""
    model, found = tiny_llama(), set()
    for code in ("x * 1.0", "x * 1.1", "x.sin()", "(lambda y: y * 1.0)(x)", "(lambda y: y * 1.1)(x)"):
        given: dict[str, Any] = {}
        exec(f"def forward(self, x):\n    return {code}\n", given)
        monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", given["forward"])
        found.add(fingerprint(model, None, [], None))
    assert len(found) == 5


def lowered(model: Any) -> None:
    model.config.rms_norm_eps = 0.1


def attribute(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 2


@pytest.mark.parametrize("change", [lowered, attribute])
def test_another_setting_is_tested(change: Callable[[Any], None]) -> None:
    model = tiny_llama()
    before = fingerprint(model, None, [], None)
    assert fingerprint(tiny_llama(), None, [], None) == before
    change(model)
    assert fingerprint(model, None, [], None) != before


def test_another_place_of_a_class_is_tested() -> None:
    found = set()
    for layer in (1, 2):
        model = tiny_llama()
        model.model.layers[layer].mlp.act_fn = torch.nn.Sigmoid()  # without any attribute
        found.add(fingerprint(model, None, [], None))
    assert len(found) == 2


def test_another_head_is_tested() -> None:
    model, head = tiny_llama(), torch.nn.Linear(3, 3)
    before = fingerprint(model, head, [], None)
    with torch.no_grad():
        head.bias[1] += 1
    assert len({before, fingerprint(model, head, [], None), fingerprint(model, None, [], None)}) == 3


def test_a_cache_that_memory_made_much_smaller_is_tested(folder: Path, kept: Path, tested: list[str]) -> None:
    """The room of rows depends on it; pages more or less do not count."""
    for number_of_bytes, tests in ((1 << 22, True), ((1 << 22) + 65536, False), (1 << 18, True)):
        with patch("specdec.loading.sizes._CPU_CACHE_BYTES", number_of_bytes):
            assert starts_test(folder, tested, kv_cache_tokens=None, max_num_seqs=32, max_model_len=120) == tests


@pytest.mark.usefixtures("every_self_test")
@pytest.mark.parametrize("self_test", ["cached", "full", "quick"])
def test_a_defect_is_refused_by_every_kind_of_test(folder: Path, kept: Path, self_test: str) -> None:
    """And never kept: a second start refuses it, too."""
    right = TorchBackend.run

    def wrong(*args: Any, **options: Any) -> torch.Tensor:
        return right(*args, **options) * 0.9

    with patch.object(specdec.loading.parts, "fingerprint_of", _keyed), patch.object(TorchBackend, "run", wrong):
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="comes out wrong"):
                load(folder, self_test=self_test)
    assert not kept.exists()


def key_file(kept: Path) -> Path:
    (file,) = kept.iterdir()
    return file


@pytest.mark.parametrize("content", ["", "{}", "one", "0.5 0.5", "\x00\x01", "\udcff"])
def test_a_damaged_file_means_testing_again(folder: Path, kept: Path, tested: list[str], content: str) -> None:
    load(folder)
    whole = key_file(kept).read_text()
    key_file(kept).write_bytes(content.encode("utf-8", "surrogateescape"))
    assert starts_test(folder, tested)
    assert key_file(kept).read_text() == whole, "and it is mended"


def test_a_folder_that_cannot_be_made_is_no_error(folder: Path, kept: Path, tested: list[str]) -> None:
    kept.parent.parent.mkdir()
    kept.parent.write_text("a file")
    assert starts_test(folder, tested) and starts_test(folder, tested)


def test_a_file_that_cannot_be_read_is_no_error(folder: Path, kept: Path, tested: list[str]) -> None:
    load(folder)
    file = key_file(kept)
    file.unlink()
    file.mkdir()
    assert starts_test(folder, tested) and starts_test(folder, tested)


@pytest.mark.thorough
def test_two_processes_that_write_at_once(tmp_path: Path) -> None:
    code = """
import sys
from specdec.selftest.kept import self_test_of
for _ in range(200):
    self_test_of("full", "k" * 64).keep(0.25)
    assert self_test_of("cached", "k" * 64).error == 0.25
"""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    running = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [each.wait(120) for each in running] == [0, 0]
    assert len(list((tmp_path / "specdec" / "self-tests").iterdir())) == 1, "and nothing half written is left"


@pytest.mark.thorough
def test_another_process_finds_the_same_key(folder: Path, tmp_path: Path) -> None:
    code = f"""
from specdec import SpeculativeModel
model = SpeculativeModel.from_pretrained({str(folder)!r}, kv_cache_tokens=400)
print(model.self_test)
"""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "random"}
    said = [subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout]
    said.append(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout)
    assert said == ["full\n", "none, by an earlier start's verdict\n"]


def test_a_start_that_keeps_nothing() -> None:
    SelfTest().keep(0.0)
    assert self_test_of("cached", None) == SelfTest()
