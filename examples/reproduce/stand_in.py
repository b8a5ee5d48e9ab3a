"""What a dry run takes in place of downloads: a few questions in the layout of $SPECDEC_DATA, and a tiny Mamba-2 model.

    python examples/reproduce/stand_in.py FOLDER

writes FOLDER/data (gsm8k, mt_bench, spec_bench, humaneval, each with as many questions as the real one, over and over
the same few; code.jsonl) and FOLDER/mamba2 (8 layers of random weights,
with the tokenizer of the built-in target). The other stand-ins are the built-in models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from evals.data.datasets import NAMED

_THINGS = ("eggs", "books", "pens", "coins", "apples", "stamps")
GSM8K = tuple(
    {
        "question": f"Tom has {n} {things}. He buys {n + 2} more. How many {things} does Tom have now?",
        "answer": f"Tom has {n} + {n + 2} = {2 * n + 2} {things}.\n#### {2 * n + 2}",
    }
    for n, things in enumerate(_THINGS * 3, 3)
)
MT_BENCH = tuple(
    {"question_id": number, "category": category, "turns": [first, second]}
    for number, category, first, second in (
        (81, "writing", "Write one sentence about a farm.", "Now write it as a question."),
        (82, "math", "What is 12 plus 30?", "And twice that?"),
    )
)
HUMANEVAL = tuple(
    {
        "task_id": f"HumanEval/{number}",
        "prompt": f"def add_{number}(x):\n    ",
        "canonical_solution": f"return x + {number}\n",
        "test": f"def check(f):\n    assert f(1) == {1 + number}\n",
        "entry_point": f"add_{number}",
    }
    for number in range(2)
)
SPEC_BENCH = tuple(
    {"question_id": number, "category": "rag", "turns": [row["question"] + " " + row["answer"]]}
    for number, row in enumerate(GSM8K[:6])
)
CODE = tuple({"prompt": f"def times_{n}(x):\n    "} for n in range(2, 8))
_SAID = (70, 75, 80)
"""The only tokens that the Mamba-2 model gives a logit other than 0."""


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
def main(folder: Path) -> None:
    """Write the stand-ins of a dry run into FOLDER."""
    data = folder / "data"
    _write(data / "gsm8k" / "train.jsonl", GSM8K[:6])
    for name, rows in (("gsm8k", GSM8K), ("mt_bench", MT_BENCH), ("spec_bench", SPEC_BENCH), ("humaneval", HUMANEVAL)):
        _write(data / NAMED[name].path, _as_many(rows, NAMED[name].questions))
    _write(data / "code.jsonl", CODE)
    write_mamba2(folder / "mamba2")


def _as_many(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """`count` of them, with ids of their own."""
    found = []
    for number in range(count):
        row = dict(rows[number % len(rows)])
        ids = {"question_id": number, "task_id": f"HumanEval/{number}"}
        found.append(row | {name: ids[name] for name in ids.keys() & row.keys()})
    return found


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_mamba2(folder: Path) -> None:
    """A random Mamba-2 model of 8 layers that says three tokens, one of which ends its text, and a tokenizer."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, Mamba2Config, Mamba2ForCausalLM

    from specdec.loading.names import builtin_path

    tokenizer = AutoTokenizer.from_pretrained(builtin_path("gsm-llama"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 8, "num_heads": 8, "head_dim": 8, "state_size": 6, "n_groups": 2}
    config = Mamba2Config(
        vocab_size=len(tokenizer), expand=2, chunk_size=8, tie_word_embeddings=False, eos_token_id=_SAID[-1], **sizes
    )
    model = Mamba2ForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.mul_(6)  # random weights of the usual size say the same token over and over
    silent = torch.ones(config.vocab_size, dtype=torch.bool)
    silent[list(_SAID)] = False
    model.get_output_embeddings().weight[silent] = 0
    model.get_output_embeddings().weight[_SAID[-1]] *= 4  # answers to HUMANEVAL end after some ten tokens, not 1,024
    model.generation_config = GenerationConfig(eos_token_id=_SAID[-1])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
