"""A dequantised GGUF file is read by transformers as the quantised one is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from fakes import LETTERS, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.gguf_files import written

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed: pip install 'specdec-hf[gguf]'")


@pytest.mark.parametrize(("kind", "exact"), [("F32", True), ("F16", False)])
def test_weights_and_tokenizer_are_the_files_own(tmp_path: Path, kind: str, exact: bool) -> None:
    from benchmarks.gguf_dequantised import main

    file, made = written(tiny_llama(), tmp_path / "tiny.gguf", "Q4_1", tokens=LETTERS), tmp_path / "made.gguf"
    run = CliRunner().invoke(main, [str(file), str(made), "--type", kind])
    assert run.exit_code == 0, run.output
    types = {tensor.tensor_type.name for tensor in gguf.GGUFReader(made).tensors}
    assert types == {"F32"} | {kind}
    read, again = (AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=each.name) for each in (file, made))
    for (name, own), other in zip(read.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(own if exact or own.ndim == 1 else own.half().float(), other.float()), name
    fields = [gguf.GGUFReader(each).fields for each in (file, made)]
    assert set(fields[0]) - set(fields[1]) <= {"general.quantization_version"}
    assert fields[1]["general.file_type"].contents() == int(kind == "F16")
    texts = [AutoTokenizer.from_pretrained(tmp_path, gguf_file=each.name).get_vocab() for each in (file, made)]
    assert texts[0] == texts[1]
