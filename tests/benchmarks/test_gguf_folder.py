"""A folder made of a GGUF file holds the weights that transformers reads from the file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from fakes import LETTERS, tiny_llama
from transformers import AutoModelForCausalLM

from tests.gguf_files import written

pytest.importorskip("gguf", reason="the package gguf is not installed: pip install 'specdec-hf[gguf]'")


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_the_weights_are_those_that_transformers_reads(tmp_path: Path, kind: str) -> None:
    from benchmarks.gguf_folder import main

    file = written(tiny_llama(), tmp_path / "tiny.gguf", kind, tokens=LETTERS)
    runner, folder = CliRunner(), str(tmp_path / "made")
    said = [runner.invoke(main, [str(file), folder, *more]).stdout for more in (["--tokenizer"], [])]
    read_and_made = [re.findall(r"\d+ tensors \w{64}", each) for each in said]
    assert read_and_made[0] == read_and_made[1] != []
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name)
    tokens = torch.tensor([[3, 5, 7]])
    assert torch.equal(made(tokens).logits, read(tokens).logits)
