"""Data of the offline tasks, for lm-eval's `custom_dataset`: from `--metadata data_dir=DIR`, else $SPECDEC_DATA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets

from evals.data.arithmetic import problems
from evals.data.datasets import DATA_VARIABLE, data_folder, read_jsonl
from evals.errors import DataError


def gsm8k(data_dir: str | None = None, **_: Any) -> Any:
    """GSM8K's train and test split. `data_dir` is the data folder, or the folder with train.jsonl and test.jsonl."""
    folder = _folder(data_dir)
    if not (folder / "test.jsonl").is_file():
        folder = folder / "gsm8k"
    splits = {split: _rows(folder / f"{split}.jsonl") for split in ("train", "test")}
    return datasets.DatasetDict(splits)


def humaneval(data_dir: str | None = None, **_: Any) -> Any:
    """HumanEval as its only split, "test"."""
    return datasets.DatasetDict({"test": _rows(_folder(data_dir) / "humaneval" / "HumanEval.jsonl")})


def arithmetic(arithmetic_questions: int = 1000, arithmetic_seed: int = 0, **_: Any) -> Any:
    """Held-out generated problems."""
    drawn = problems("heldout", arithmetic_questions, arithmetic_seed)
    rows = [{"question": problem.question, "answer": problem.answer} for problem in drawn]
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)})


def _folder(data_dir: str | None) -> Path:
    folder = data_folder(Path(data_dir) if data_dir else None)
    if folder is None:
        raise DataError(f"no local data: set {DATA_VARIABLE}, or pass --metadata data_dir=DIR (lm-eval) or --data")
    return folder


def _rows(path: Path) -> Any:
    rows = [dict(record) for _, record in read_jsonl(path)]
    if not rows:
        raise DataError(f"the file {path} has no questions")
    return datasets.Dataset.from_list(rows)
