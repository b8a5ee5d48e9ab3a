"""A warning is shown at the line of the user's that called into this library, whatever lies between."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from typing import Any

import pytest
from fakes import LetterTokenizer, tiny_llama, wrap

from evals.data.datasets import warn_without_template
from specdec import SpecdecWarning, SpeculativeModel
from specdec.user_warnings import busy_cores
from tests.fp8 import LLAMA, write

ROOT = Path(__file__).parents[2]


class Long(LetterTokenizer):
    """With more tokens than any target of the tests."""

    def __len__(self) -> int:
        return 100_000


def folder_of_fp8(folder: Path) -> tuple[Any, Any]:
    return write(folder / "target", LLAMA), LetterTokenizer()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "words"),
    [(lambda _: (tiny_llama(), Long()), "has 100000 tokens"), (folder_of_fp8, "runs on a CPU")],
    ids=["a tokenizer", "FP8 on a CPU"],
)
@pytest.mark.cases(1)
def test_warnings_point_at_the_users_line(make: Any, words: str, tmp_path: Path) -> None:
    target, tokenizer = make(tmp_path)
    sizes: dict[str, Any] = {"max_num_seqs": 2, "page_size": 4, "kv_cache_tokens": 200}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        SpeculativeModel.from_pretrained(target, tokenizer=tokenizer, **sizes).close()  # this line
    (found,) = [one for one in said if one.category is SpecdecWarning]
    assert words in str(found.message) and found.filename == __file__
    assert Path(__file__).read_text().splitlines()[found.lineno - 1].endswith("# this line")


def test_a_package_that_adds_commands_is_not_the_user() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_without_template()
    assert [one.filename for one in said] == [__file__]


@pytest.mark.slow
@pytest.mark.thorough
def test_all_warnings_go_that_way() -> None:
    """Nothing of ours counts frames by hand."""
    by_hand = [
        str(path.relative_to(ROOT))
        for package in ("attention", "drafters", "specdec", "evals")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("warnings.warn", "warn")
    ]
    assert by_hand == ["specdec/user_warnings.py"]


@pytest.mark.parametrize(
    ("threads", "load", "warns"), [(1, 8.0, False), (4, 0.5, False), (4, 2.9, False), (4, 3.1, True), (2, 9.0, True)]
)
def test_more_threads_than_free_cores_are_named_with_the_setting(
    threads: int, load: float, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    assert ("set OMP_NUM_THREADS=1" in busy_cores(threads)) == warns == bool(busy_cores(threads))
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        wrap(tiny_llama())
    assert ["4 cores are busy" in str(each.message) for each in found if "cores" in str(each.message)] == [True] * warns
