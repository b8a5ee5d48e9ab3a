"""Files of weights: pickles in shards are read like any others, and of a file that cannot be read the cause is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafters.checkpoints.tensor_files import open_folder
from drafters.errors import HeadLoadError
from tests.head_layouts import specforge


def in_pickles(folder: Path) -> Path:
    """The head of `specforge` as transformers wrote large models before safetensors."""
    layout = specforge()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(layout.config))
    where = {name: f"pytorch_model-{1 + i % 2:05}-of-00002.bin" for i, name in enumerate(sorted(layout.tensors))}
    for file in set(where.values()):
        torch.save({name: t for name, t in layout.tensors.items() if where[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def test_pickles_in_shards(tmp_path: Path) -> None:
    folder, plain = open_folder(in_pickles(tmp_path / "bin")), open_folder(specforge().write(tmp_path / "plain"))
    assert {n: i.shape for n, i in folder.tensors.items()} == {n: i.shape for n, i in plain.tensors.items()}
    ours, theirs = folder.load(folder.tensors), plain.load(plain.tensors)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    (folder.path / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(HeadLoadError, match=r"1 of 2 files that pytorch_model\.bin\.index.* \(.*00002-of-00002"):
        open_folder(folder.path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            "a pointer of git-lfs and not the weig",
        ),
        (b"", "It has 0 bytes: download it anew"),
        (None, r"It has [\d,]+ bytes and is cut off or damaged: download it anew"),
    ],
)
def test_why_a_file_cannot_be_read(content: bytes | None, words: str, tmp_path: Path) -> None:
    folder = replace(specforge(), file="one").write(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100] if content is None else content)
    with pytest.raises(HeadLoadError, match=words):
        open_folder(folder)
