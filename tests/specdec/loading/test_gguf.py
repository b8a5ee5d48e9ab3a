"""Targets in GGUF: tokens of the model that transformers reads, which file is meant, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fakes import LETTERS, LetterTokenizer, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import SpecdecWarning, SpeculativeModel
from specdec.cli.main import cli
from specdec.errors import HeadLoadError, HeadMismatchError, InvalidInputError, ModelLoadError
from specdec.loading.checkpoint import parsed_once
from specdec.loading.names import find_gguf
from tests.gguf_files import written

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed: pip install 'specdec-hf[gguf]'")
PROMPTS = [[3, 5, 7, 3, 5, 7, 3, 5], [9], [4, 4, 8, 1, 2] * 7]
SIZES: dict[str, Any] = {"max_num_seqs": 4, "kv_cache_tokens": 2048, "max_model_len": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one GGUF file, in Q8_0, with a tokenizer."""
    made = tmp_path_factory.mktemp("q8")
    written(tiny_llama(), made / "tiny.Q8_0.gguf", tokens=LETTERS)
    return made


def opened(target: Any, **options: Any) -> SpeculativeModel:
    return SpeculativeModel.from_pretrained(target, **{"tokenizer": LetterTokenizer(), **SIZES, **options})


def own_tokens(model: Any, new: int = 24) -> list[list[int]]:
    """What transformers generates greedily."""
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        found.append(out[0, len(prompt) :].tolist())
    return found


def tokens_of(model: SpeculativeModel, new: int = 24) -> list[list[int]]:
    return [list(c.token_ids) for c in model.generate(PROMPTS, max_new_tokens=new, ignore_eos=True)]


@pytest.mark.filterwarnings("ignore::specdec.SpecdecWarning")
@pytest.mark.parametrize("kind", ["Q8_0", "F16", "F32", "BF16", "Q4_1", "Q5_0"])
@pytest.mark.cases(2)
def test_tokens_are_those_of_the_model_that_transformers_reads(tmp_path: Path, kind: str) -> None:
    file = written(tiny_llama(), tmp_path / f"tiny.{kind}.gguf", kind)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    for draft in (None, "lookup"):
        with opened(file, draft=draft) as model:
            assert tokens_of(model) == own_tokens(theirs)
            for name, ours in model.hf_model.state_dict().items():
                assert ours.dtype == torch.float32 and torch.equal(ours, theirs.state_dict()[name]), name


def test_weights_are_those_of_the_file(tmp_path: Path) -> None:
    """Also for the writer of these tests: what went in comes out."""
    source = tiny_llama()
    with opened(written(source, tmp_path / "tiny.gguf", "F32")) as model:
        for (name, ours), theirs in zip(model.hf_model.state_dict().items(), source.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs), name
        assert model.describe()["quantisation"] is None


def test_a_file_a_folder_and_a_name_in_a_folder_are_one_target(folder: Path, tmp_path: Path) -> None:
    file = str(folder / "tiny.Q8_0.gguf")
    assert find_gguf(file, None) == find_gguf(str(folder), None) == find_gguf(str(folder), "tiny.Q8_0.gguf")
    assert find_gguf(file, None) == (str(folder), file)
    assert find_gguf("owner/name", "x.gguf") == ("owner/name", "x.gguf")
    assert find_gguf(str(tmp_path), None) == (str(tmp_path), None)
    written(tiny_llama(), tmp_path / "a.gguf", "F16")
    (tmp_path / "config.json").write_text("{}")
    assert find_gguf(str(tmp_path), None) == (str(tmp_path), None), "the folder's own weights"
    assert find_gguf(str(tmp_path), "a.gguf")[1] == str(tmp_path / "a.gguf")


def test_a_file_of_that_name_in_the_working_directory_is_another(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would read the weights from there, and the configuration from the folder."""
    written(tiny_llama(seed=1), tmp_path / "tiny.Q8_0.gguf")
    theirs = own_tokens(AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.Q8_0.gguf"))
    monkeypatch.chdir(tmp_path)
    with opened(folder, gguf_file="tiny.Q8_0.gguf") as model:
        assert tokens_of(model) == theirs


def test_the_types_are_shown_and_said(folder: Path) -> None:
    with pytest.warns(SpecdecWarning, match=r"quantised by gguf \(Q8_0\), and run dequantised in float32"):
        model = opened(folder)
    with model:
        found = model.describe()["quantisation"]
        assert model.describe()["target"] == str(folder / "tiny.Q8_0.gguf")
        assert found["method"] == "gguf" and found["scheme"] == "Q8_0"
        assert found["runs"].startswith("dequantised in float32")


@pytest.mark.filterwarnings("ignore::specdec.SpecdecWarning")
def test_auto_is_float32_and_another_dtype_is_what_transformers_makes(tmp_path: Path) -> None:
    """Also of a file in 16 bits: its dtype is no checkpoint's dtype."""
    file = written(tiny_llama(), tmp_path / "tiny.gguf", "BF16")
    with opened(file) as model:
        assert {p.dtype for p in model.hf_model.parameters()} == {torch.float32}
    with opened(file, dtype="bfloat16") as model:
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.bfloat16).state_dict()
        for name, ours in model.hf_model.state_dict().items():
            assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs[name])


@pytest.mark.filterwarnings("ignore::specdec.SpecdecWarning")
def test_the_tokenizer_is_the_files_own(folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder, gguf_file="tiny.Q8_0.gguf")
    with SpeculativeModel.from_pretrained(folder, **SIZES) as model:
        assert model.tokenizer("abba").input_ids == theirs("abba").input_ids
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.Q8_0.gguf")
    with SpeculativeModel.from_pretrained(loaded, **SIZES) as model:
        assert model.tokenizer("abba").input_ids == theirs("abba").input_ids
        assert tokens_of(model) == own_tokens(loaded)


def rewritten(file: Path, to: Path, place: int, new: bytes) -> Path:
    """A copy of a file with other bytes in one place."""
    data = file.read_bytes()
    to.write_bytes(data[:place] + new + data[place + len(new) :])
    return to


def refused(error: type[Exception], match: str, target: Any, **options: Any) -> None:
    with pytest.raises(error, match=match):
        opened(target, **options)


def test_what_is_not_read_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    file = folder / "tiny.Q8_0.gguf"
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"PK\3\4" + bytes(400))
    refused(ModelLoadError, "wrong.gguf.*not a GGUF file", wrong)
    refused(ModelLoadError, "GGUF v1;.*download the GGUF file again", rewritten(file, wrong, 4, b"\1\0\0\0"))
    refused(ModelLoadError, "architecture nosuch is not supported", written(tiny_llama(), wrong, architecture="nosuch"))
    refused(ModelLoadError, "one of several parts.*--merge", written(tiny_llama(), wrong, parts=3))
    refused(ModelLoadError, "1 tensor missing .*layers.2.mlp.up_proj", written(tiny_llama(), wrong, without="2.ffn_up"))
    wrong.write_bytes(file.read_bytes()[:-2000])
    refused(ModelLoadError, "download the GGUF file again", wrong)
    refused(ModelLoadError, "gguf_file='no.gguf' means no file in", folder / "no.gguf")
    refused(ModelLoadError, "gguf_file='no.gguf' means no file in", folder, gguf_file="no.gguf")
    refused(InvalidInputError, "one process; give 1", file, tensor_parallel_size=2)
    refused(InvalidInputError, "loaded already; leave it out", tiny_llama(), gguf_file="a.gguf")
    refused(InvalidInputError, "only models on the hub have revisions", file, revision="main")
    shutil.copy(file, tmp_path / "b.gguf")
    refused(ModelLoadError, "gguf_file=None means .*b.gguf.*wrong.gguf.* give the name", tmp_path)


def test_a_type_and_a_package_are_looked_for_before_anything_is_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.loading.targets.AutoConfig", None)
    file, wrong = folder / "tiny.Q8_0.gguf", tmp_path / "wrong.gguf"
    name = b"token_embd.weight"
    type_at = file.read_bytes().index(name) + len(name) + 4 + 2 * 8
    refused(ModelLoadError, "99 is not a valid GGMLQuantizationType", rewritten(file, wrong, type_at, b"\x63\0\0\0"))
    refused(ModelLoadError, "I32", rewritten(file, wrong, type_at, b"\x1a\0\0\0"))
    monkeypatch.setattr("specdec.loading.quantisation._missing", lambda *packages: ["gguf>=0.10.0"])
    refused(ModelLoadError, r'quant_method gguf needs the package gguf.*pip install "specdec-hf\[gguf\]"', file)


def test_a_head_of_another_size_is_refused_and_one_in_a_gguf_file_too(folder: Path) -> None:
    file = folder / "tiny.Q8_0.gguf"
    refused(HeadMismatchError, "hidden size 256, this target has 32", file, draft="gsm-llama-eagle3")
    refused(HeadLoadError, "", file, draft=file)
    refused(HeadLoadError, "", file, draft="mtp")
    refused(HeadLoadError, "has no built-in head", file, draft="auto")


@pytest.mark.filterwarnings("ignore::specdec.SpecdecWarning")
def test_commands_take_a_file(folder: Path, tmp_path: Path) -> None:
    file, sizes = str(folder / "tiny.Q8_0.gguf"), ["--kv-cache-tokens", "2048", "--draft", "none"]
    runner = CliRunner()
    shown = runner.invoke(cli, ["inspect", "--model", file, *sizes, "--json"])
    assert json.loads(shown.stdout)["quantisation"]["scheme"] == "Q8_0", shown.output
    ours = [
        runner.invoke(cli, ["generate", "abab", "--max-new-tokens", "8", *sizes, *model])
        for model in (["--model", file], ["--model", str(folder), "--gguf-file", "tiny.Q8_0.gguf"])
    ]
    assert ours[0].exit_code == 0 and ours[0].stdout == ours[1].stdout, ours[0].output
    answered = runner.invoke(cli, ["chat", "--model", file, *sizes, "--max-new-tokens", "4"], input="ab\n")
    assert answered.exit_code == 0, answered.output
    missing = runner.invoke(cli, ["chat", "--model", str(tmp_path / "no.gguf")])
    assert missing.exit_code != 0 and "there is no" in missing.output


def test_a_file_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again at the next load: it may be another file of the same name."""
    file, parsed = tmp_path / "tiny.gguf", []
    right = gguf.GGUFReader

    def counted(path: Any, *more: Any) -> Any:
        parsed.append(str(path))
        return right(path, *more)

    monkeypatch.setattr(gguf, "GGUFReader", counted)
    seen = []
    for seed in (0, 1):
        written(tiny_llama(seed=seed), file, "F32", tokens=LETTERS)
        with opened(file, tokenizer=None) as model:
            seen.append(tokens_of(model))
    assert parsed == [str(file)] * 2 and seen[0] != seen[1]


@pytest.mark.filterwarnings("ignore::specdec.SpecdecWarning")
def test_the_package_gguf_stays_as_it_is(folder: Path) -> None:
    before = dict(vars(gguf))
    with parsed_once(folder / "tiny.Q8_0.gguf", None):
        assert gguf.GGUFReader is not before["GGUFReader"]
        first = parsed_once(folder, None)  # of another thread, which ends later
        first.__enter__()
    first.__exit__(None, None, None)
    assert dict(vars(gguf)) == before
    with pytest.raises(RuntimeError), parsed_once(folder, None):
        raise RuntimeError
    with parsed_once("owner/name", None), parsed_once(tiny_llama(), None):
        assert dict(vars(gguf)) == before
    opened(folder).close()
    assert dict(vars(gguf)) == before
