"""The verification result: what the device packs is what the host reads."""

from __future__ import annotations

import ast
import doctest
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specdec.acceptance.packed
from specdec.acceptance.packed import PackedResult, unpack_outcome
from specdec.execution.readback import HostReads

ROOT = Path(__file__).resolve().parent.parent.parent.parent


def test_the_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(specdec.acceptance.packed, extraglobs={"torch": torch})
    assert outcome.failed == 0 and outcome.attempted == 2


@given(st.integers(1, 4), st.integers(0, 5), st.integers(0, 2**32 - 1))
def test_the_host_reads_what_the_device_packed(rows: int, num_drafts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drafts = torch.randint(100, (rows, num_drafts), generator=generator)
    accepted = torch.randint(num_drafts + 1, (rows,), generator=generator)
    following = torch.randint(100, (rows,), generator=generator)
    result = PackedResult.pack(accepted, following, drafts)
    assert result.packed.numel() == PackedResult.numel(rows, num_drafts) and result.num_rows == rows
    outcome = unpack_outcome(result.packed.numpy())
    for name in ("num_accepted", "tokens", "drafts"):
        assert getattr(outcome, name).tolist() == getattr(result, name).tolist()
    assert outcome.num_accepted.tolist() == accepted.tolist() and outcome.drafts.tolist() == drafts.tolist()
    for row, count in enumerate(accepted.tolist()):
        assert outcome.tokens[row, : count + 1].tolist() == [*drafts[row, :count].tolist(), int(following[row])]
    assert result.first_token.tolist() == outcome.tokens[:, 0].tolist()


def test_accessors_are_views_and_fewer_rows_share_the_memory() -> None:
    result = PackedResult.zeros(3, 2, torch.device("cpu"))
    result.rows(2).first_token.copy_(torch.tensor([7, 8]))
    result.num_accepted[2] = 1
    result.drafts[1] = torch.tensor([5, 6])
    assert result.packed.tolist() == [[0, 7, 0, 0, 0, 0], [0, 8, 0, 0, 5, 6], [1, 0, 0, 0, 0, 0]]


def test_a_read_goes_through_the_hook_first() -> None:
    """The seam of benchmarks that draw tokens on the device."""
    reads = HostReads(PackedResult.numel(2, 0), torch.device("cpu"))
    reads.before_read = lambda result, num_drafts: result.first_token.copy_(num_drafts)  # type: ignore[assignment]
    result = PackedResult.zeros(2, 0, torch.device("cpu"))
    assert reads.start(result, torch.tensor([9, 8])).wait().tolist() == [[0, 9], [0, 8]]
    assert result.first_token.tolist() == [9, 8], "what follows on the device reads the same"


def subscripts_of_packed(source: str) -> list[int]:
    """Lines that index something called packed by column."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] == "packed":
            found.append(node.lineno)
    return found


@pytest.mark.slow
@pytest.mark.thorough
def test_no_other_file_knows_a_column() -> None:
    files = [path for name in ("specdec", "benchmarks") for path in sorted((ROOT / name).rglob("*.py"))]
    knowing = {path.relative_to(ROOT).as_posix() for path in files if subscripts_of_packed(path.read_text("utf-8"))}
    assert knowing == {"specdec/acceptance/packed.py"}


@pytest.mark.parametrize("line", ["x = packed[:, 1]", "x = bucket.packed[:, 0] + 1"])
def test_a_planted_column_is_seen(line: str) -> None:
    assert subscripts_of_packed(line) == [1]
