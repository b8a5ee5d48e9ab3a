"""The file of choices: what is read is what was written, and damage costs a new timing, never a start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specdec.compiler.gemm_selection import ChoiceStore, cache_folder
from specdec.ops.gemm import Algorithm, ProductShape

WIDE = ProductShape(torch.bfloat16, 6144, 4096, 96)
LONG = ProductShape(torch.float16, 4096, 14336, 48)
FASTER = Algorithm(bytes(range(64)), 4 << 20)
USUAL = None


def store(folder: Path, gpu: str = "NVIDIA H200 132", version: int = 130100) -> ChoiceStore:
    return ChoiceStore(gpu, version, folder)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert store(tmp_path).read() == {}
    assert store(tmp_path).add({WIDE: FASTER}) and store(tmp_path).add({LONG: USUAL})
    assert store(tmp_path).read() == {"bfloat16 6144x4096 96": FASTER, "float16 4096x14336 48": USUAL}


def test_shapes_of_other_tokens_or_dtype_have_other_names() -> None:
    changes = ({"tokens": 48}, {"dtype": torch.float16}, {"rows": 4096}, {})
    wide = {"dtype": torch.bfloat16, "rows": 6144, "width": 4096, "tokens": 96}
    assert len({str(ProductShape(**wide | change)) for change in changes}) == 4


def test_each_gpu_and_version_has_a_file_of_its_own(tmp_path: Path) -> None:
    store(tmp_path).add({WIDE: FASTER})
    for other in (store(tmp_path, gpu="NVIDIA H200 66"), store(tmp_path, version=130200)):
        assert other.path != store(tmp_path).path and other.read() == {}


def test_a_file_that_was_renamed_is_not_believed(tmp_path: Path) -> None:
    store(tmp_path).add({WIDE: FASTER})
    other = store(tmp_path, version=130200)
    store(tmp_path).path.rename(other.path)
    assert other.read() == {}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 1}', "\x00\xff", '{"choices": 3}'])
def test_a_damaged_file_is_empty_and_is_written_anew(tmp_path: Path, text: str) -> None:
    kept = store(tmp_path)
    kept.add({LONG: USUAL})
    kept.path.write_bytes(text.encode("latin-1"))
    assert kept.read() == {}
    assert kept.add({WIDE: FASTER}) and kept.read() == {str(WIDE): FASTER}


@pytest.mark.parametrize(
    "damage",
    [["xyz", 0], [3, 0], ["ff", "many"], ["ff", -1], ["ff", 1e999], ["ff"], [], {}, 3, "ff"],
)
def test_a_damaged_choice_is_left_out_alone(tmp_path: Path, damage: object) -> None:
    kept = store(tmp_path)
    kept.add({WIDE: FASTER, LONG: USUAL})
    content = json.loads(kept.path.read_text())
    content["choices"][str(WIDE)] = damage
    kept.path.write_text(json.dumps(content))
    assert kept.read() == {str(LONG): USUAL}


def test_nothing_is_left_beside_the_file(tmp_path: Path) -> None:
    store(tmp_path).add({WIDE: FASTER})
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".lock"}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = store(tmp_path / "file")
    assert not kept.add({WIDE: FASTER}) and kept.read() == {}


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "specdec"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the standard
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "specdec"
