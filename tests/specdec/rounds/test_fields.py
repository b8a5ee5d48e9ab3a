"""Sections of the arena: each holds its names alone, and what is sent arrives."""

from __future__ import annotations

import ast
import doctest
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes import table_head, tiny_llama

import specdec.rounds.buckets
from attention.recurrence.index import FoldRule
from drafters.loops.base import DraftInput, LoopSize, PrefillPasses
from drafters.loops.chain import ChainLoop, DraftSection
from specdec.config import EngineConfig
from specdec.extras.long_factors import LongFactors
from specdec.extras.recurrent_states import RecurrentStates
from specdec.rounds.rows import RowTable, Schedule
from specdec.rounds.transfer import (
    AheadSection,
    RoundTransfer,
    SamplingSection,
    VerificationSection,
    make_sections,
    target_sizes,
)
from specdec.rounds.verification import RoundTables, target_arrays
from specdec.wrapped.long_rope import LongRopeRule

ROOT = Path(__file__).resolve().parent.parent.parent.parent
HOMES = {
    "target.": "specdec/rounds/transfer.py",
    "ahead.": "specdec/rounds/transfer.py",
    "sampling.": "specdec/rounds/transfer.py",
    "passes.": "specdec/rounds/transfer.py",
    "prefill.": "drafters/loops/chain.py",
    "step.": "drafters/loops/steps.py",
}


def arena_names(source: str) -> set[str]:
    """Prefixes of HOMES with which a string constant of the source begins (f-strings' parts too), or that it names a
    section by."""
    nodes = list(ast.walk(ast.parse(source)))
    constants = (n.value for n in nodes if isinstance(n, ast.Constant))
    texts = [text for text in constants if isinstance(text, str) and " " not in text]
    calls = (n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) in ("Section", "BatchSection"))
    given = (arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant))
    texts += [f"{name}." for name in given if isinstance(name, str)]
    return {prefix for prefix in HOMES for text in texts if text.startswith(prefix)}


def test_a_sections_names_stand_in_one_file() -> None:
    found: dict[str, set[str]] = {prefix: set() for prefix in HOMES}
    for package in ("drafters/loops", "specdec/rounds", "specdec/execution", "specdec/engine", "specdec/acceptance"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for prefix in arena_names(path.read_text("utf-8")):
                found[prefix].add(path.relative_to(ROOT).as_posix())
    assert found == {prefix: {home} for prefix, home in HOMES.items()}


def test_a_planted_name_is_seen() -> None:
    assert arena_names('x = staged["step.positions"]') == {"step."}
    assert arena_names('x = staged[f"target.{name}"]') == {"target."}
    assert arena_names('x = Section(Kind, "ahead")') == {"ahead."}


def test_no_two_sections_share_a_name_and_every_dimension_has_a_size() -> None:
    size = LoopSize(4, 16, 8, 3)
    extras = [LongFactors(LongRopeRule(8)), RecurrentStates(FoldRule.deferred(3))]
    target, sampling = VerificationSection(2, make_sections(extras, False)), SamplingSection(ahead=False)
    ahead = AheadSection(PrefillPasses(3))
    common = target_sizes(4, 16, 8, 3, groups=(7, 9)) | sampling.sizes(3) | ahead.sizes(4, 16, 8)
    shared = target.fields + sampling.fields + ahead.fields
    for section in (DraftSection(1), DraftSection(3)):
        fields, sizes = (*shared, *section.fields), section.sizes(size)
        assert len({field.name for field in fields}) == len(fields)
        assert {dim for field in fields for dim in field.dims} <= set(common | sizes)
        assert not set(common) & set(sizes)


def test_the_examples_in_the_docstrings() -> None:
    outcome = doctest.testmod(specdec.rounds.buckets)
    assert outcome.failed == 0 and outcome.attempted == 5


@pytest.mark.parametrize("drafting", [False, True])
def test_a_round_is_one_copy_with_and_without_its_draft_loop(drafting: bool) -> None:
    """Two rows after a verification of K=2: one keeps all its drafts, the other none."""
    config = EngineConfig(2, 64, 2, 16, 4, 40)
    loop = ChainLoop(table_head(tiny_llama()))
    transfer = RoundTransfer(loop, config, torch.device("cpu"))
    table, pages = RowTable(2, 64), np.arange(1, 33, dtype=np.int32).reshape(2, 16)
    for row, length in enumerate((12, 7)):
        table.tokens[row, :length] = np.arange(length) + 100 * (row + 1)
        table.length[row], table.computed[row], table.limit[row], table.drafts[row] = length, length - 1, 60, 2
    rows, ones = np.array([0, 1]), np.ones(2, np.int64)
    schedule = Schedule(rows, ones, np.array([2, 1]))
    draft = DraftInput(
        query_start_loc=np.array([0, 3, 6]),
        num_drafts=np.array([2, 2]),
        num_accepted=np.array([2, 0]),
        order=rows,
        request_rows=rows,
        committed_lens=table.computed[rows],
        tokens=table.tokens,
        num_drafts_next=schedule.num_drafts,
        block_table=pages,
        page_size=4,
    )
    target = target_arrays(schedule, table, RoundTables(pages, None, 4))
    device, sent = transfer.send(target.inputs, loop.arrays(draft) if drafting else None, None)
    assert transfer.arena.generation == 1
    assert device.token_ids.tolist() == [111, 0, 0, 206, 0] and device.draft_places.tolist() == [1, 2, 4]
    assert device.draft_sources.tolist() == [0, 1, 2] and device.logit_index.tolist() == [[0, 1, 2], [3, 4, 4]]
    assert device.metadata.positions.tolist() == [11, 12, 13, 6, 7] and device.sampling is None
    if not drafting:
        assert sent is None
        return
    (prefill,), steps = sent.passes, sent.steps  # type: ignore[union-attr, attr-defined]
    assert prefill.sources.tolist() == [0, 1, 2, 3] and prefill.token_ids.tolist() == [109, 110, 111, 206]
    assert prefill.metadata.positions.tolist() == [8, 9, 10, 5] and prefill.last_row.tolist() == [2, 3]
    assert [step.positions.tolist() for step in steps] == [[11, 0]]
