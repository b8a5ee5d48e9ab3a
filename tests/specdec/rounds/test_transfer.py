"""What arrives on the device in a round's one copy is what the arrays say, at their own places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import table_head, tiny_llama

import specdec.rounds.transfer
from attention.staging import Bucket, Field, Staged, StagingArena, bucket_of, layout_of
from drafters.loops.base import DraftInput, LoopSize, PrefillPasses
from drafters.loops.chain import ChainLoop, DraftInputs
from specdec.config import EngineConfig
from specdec.requests.sampling import SamplingParams
from specdec.rounds.drafting import ahead_inputs, draft_input
from specdec.rounds.randomness import SamplingRound, sampling_round
from specdec.rounds.rows import RowTable, Schedule
from specdec.rounds.transfer import AheadTransfer, DeviceRound, RoundTransfer, staging_bytes
from specdec.rounds.verification import RoundTables, TargetArrays, Verified, target_arrays

CPU, PAGE, K, ROWS = torch.device("cpu"), 4, 3, np.array([1, 0])
CONFIG = EngineConfig(K, 32, 2, 16, PAGE, 20)
BLOCK_TABLE = np.arange(1, 17, dtype=np.int32).reshape(2, 8)


def arrays(temperature: float = 0.0) -> tuple[DraftInput | None, TargetArrays, SamplingRound | None]:
    """Two rows that verified K drafts, accepted 2 and 0 of them, and draft K more."""
    table = RowTable(2, 32)
    for length in (9, 12):
        table.open(np.arange(length) + length, 32, K, 1, SamplingParams(temperature=temperature))
    table.computed[:] = table.prefill[:] = table.length - 1
    table.mark_batch(ROWS)
    verified = Verified(np.array([0, 4, 8]), ROWS, np.full(2, K), np.array([2, 0]))
    schedule = Schedule(ROWS, np.ones(2, np.int64), np.full(2, K))
    draft = draft_input(verified, schedule, table, BLOCK_TABLE, PAGE)
    target = target_arrays(schedule, table, RoundTables(BLOCK_TABLE, BLOCK_TABLE, PAGE))
    return draft, target, sampling_round(target, schedule.rows, table) if temperature else None


def sent(temperature: float = 0.0, with_draft: bool = True) -> tuple[DeviceRound, object, RoundTransfer]:
    draft, target, sampling = arrays(temperature)
    loop = ChainLoop(table_head(tiny_llama()))
    transfer = RoundTransfer(loop, CONFIG, CPU)
    return *transfer.send(target.inputs, loop.arrays(draft) if with_draft else None, sampling), transfer


def verification(temperature: float = 0.0) -> DeviceRound:
    return sent(temperature)[0]


def chain(temperature: float = 0.0) -> DraftInputs:
    loop = sent(temperature)[1]
    assert isinstance(loop, DraftInputs)
    return loop


def test_a_verification_reads_bonus_tokens_and_has_places_for_its_drafts() -> None:
    round_, drafting, transfer = sent(with_draft=False)
    assert round_.token_ids.tolist() == [23, 0, 0, 0, 17, 0, 0, 0]
    assert round_.draft_places.tolist() == [1, 2, 3, 5, 6, 7] and round_.draft_sources.tolist() == list(range(6))
    assert round_.logits_indices.tolist() == list(range(8))
    assert round_.logit_index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert round_.metadata.positions.tolist() == [11, 12, 13, 14, 8, 9, 10, 11]
    assert drafting is None and round_.sampling is None
    assert transfer.arena.generation == 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_everything_of_a_round_is_one_copy(temperature: float) -> None:
    round_, drafting, transfer = sent(temperature)
    assert transfer.arena.generation == 1
    assert isinstance(drafting, DraftInputs) and len(drafting.steps) == K - 1
    assert (round_.sampling is None) == (temperature == 0)


def test_the_draft_prefill_reads_what_was_accepted_one_token_on() -> None:
    """Positions of the accepted token rows, each with the token after it."""
    (prefill,) = chain().passes
    assert prefill.metadata.positions.tolist() == [8, 9, 10, 7]
    assert prefill.token_ids.tolist() == [21, 22, 23, 17]
    assert prefill.sources.tolist() == [0, 1, 2, 4] and prefill.last_row.tolist() == [2, 3]


def test_every_draft_step_writes_the_slot_of_its_position() -> None:
    for number, step in enumerate(chain().steps):
        positions = np.array([11, 8]) + number
        slots = BLOCK_TABLE[ROWS, positions // PAGE] * PAGE + positions % PAGE
        assert step.positions.tolist() == positions.tolist() and step.slot_mapping.tolist() == slots.tolist()
        assert step.seq_lens.tolist() == (positions + 1).tolist()
        counts = -(-(positions + 1) // PAGE)
        pages = [page for row, n in zip(ROWS, counts, strict=True) for page in BLOCK_TABLE[row, :n].tolist()]
        assert step.page_indices.tolist() == pages


def test_sampling_parameters_and_uniforms_arrive_as_they_are() -> None:
    round_ = verification(0.7)
    _, _, sampling = arrays(0.7)
    assert round_.sampling is not None and sampling is not None
    assert np.allclose(round_.sampling.tensors.temperature.numpy(), 0.7)
    drafts = sampling.max_drafts
    assert np.array_equal(round_.sampling.draft_uniform.numpy(), sampling.draft_uniforms())
    assert np.array_equal(round_.sampling.accept_uniform.numpy(), sampling.accept_uniforms(drafts))
    assert np.array_equal(round_.sampling.next_uniform.numpy(), sampling.next_uniforms(drafts + 1))


def test_a_greedy_round_reads_temperatures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowTable, "sampling", lambda self, rows: pytest.fail("parameters were read"))
    assert arrays()[2] is None


def test_drafts_after_a_round_take_the_uniforms_that_the_next_round_knows_for_them() -> None:
    """Whatever is accepted: the uniform depends on the position alone, so that eager and graph rounds draw the same."""
    _, target, sampling = arrays(0.7)
    assert sampling is not None
    ahead = sampling.ahead_uniforms(6)  # K=3
    for accepted in range(4):
        following = replace(sampling, first=sampling.first + accepted + 1)
        assert np.array_equal(ahead[:, accepted : accepted + 3][: len(target.decided)], following.draft_uniforms())


class Noted(StagingArena):
    """Notes of every transfer the names of its arrays and the fields that it copies, with their bytes."""

    made: list[Noted]

    def __init__(self, fields: Sequence[Field], max_bucket: Bucket, device: torch.device) -> None:
        super().__init__(fields, max_bucket, device)
        self.fields, self.most = fields, layout_of(fields, max_bucket).nbytes
        self.sent: list[tuple[set[str], dict[str, int]]] = []
        Noted.made.append(self)

    def send(self, bucket: Bucket, arrays: Mapping[str, np.ndarray]) -> Staged:
        self.sent.append((set(arrays), {field.name: layout_of([field], bucket).nbytes for field in self.fields}))
        return super().send(bucket, arrays)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Noted]:
    monkeypatch.setattr(specdec.rounds.transfer, "StagingArena", Noted)
    monkeypatch.setattr(Noted, "made", [], raising=False)
    return Noted.made


def test_a_transfer_copies_what_its_kind_of_round_sends_and_nothing_else(noted: list[Noted]) -> None:
    """Sampled rows, drafts in other rows: every array that there can be. With 2 rows each fills its 64 bytes at most.

    A verification has 8 arrays of its batch and 7 of its own; a draft prefill before the read has slots, pages and 5
    more; sampling has 7. The draft loop reads 4 tokens of 2 rows.
    """
    draft, target, sampling = arrays(0.7)
    target = replace(target, sources=ROWS)
    loop = ChainLoop(table_head(tiny_llama()))
    RoundTransfer(loop, CONFIG, CPU).send(target.inputs, loop.arrays(draft), sampling)
    transfer = AheadTransfer(PrefillPasses(1), CONFIG, CPU)
    transfer.send_ahead(ahead_inputs(target, PrefillPasses(1)), transfer.send(target.inputs))
    assert transfer.transfers == 2
    for arena in noted:
        ((names, fields),) = arena.sent
        assert set(fields) == names
    eager, alone, ahead = (sum(arena.sent[0][1].values()) for arena in noted)
    assert alone == (8 + 7) * 64 and ahead == (2 + 5) * 64
    drafting = layout_of(loop.section.fields, bucket_of(**loop.section.sizes(LoopSize(2, 4, 8, K)))).nbytes
    assert eager - alone == 7 * 64 + drafting


def test_no_round_from_graphs_needs_a_larger_buffer_than_what_is_checked_at_loading(noted: list[Noted]) -> None:
    loop = ChainLoop(table_head(tiny_llama()))
    RoundTransfer(loop, CONFIG, CPU), AheadTransfer(PrefillPasses(1), CONFIG, CPU)
    eager, verification, ahead = noted
    assert verification.most + ahead.most < eager.most == staging_bytes(loop, CONFIG)
