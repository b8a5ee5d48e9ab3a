"""Rounds of several multi-token-prediction modules, operator by operator.

Verifications are those of `EagerExecutor`. The draft loop has arrays of its own, sent in a second transfer: every
module's rows of the first pass, and steps of up to M rows a request. One vector a request and module is kept on the
device from round to round (see `drafters.loops.modules.index`), by the request's row in the table: a request that
starts again reads none of an earlier one's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from attention.batch.host import HostBatch
from attention.batch.metadata import CommonAttentionMetadata, batch_arrays, batch_fields, batch_sizes, from_staged
from attention.batch.staging import Bucket, Field, Staged, StagingArena, bucket_of
from drafters.loops.chain.run import Draft
from drafters.loops.modules.index import module_batch, module_rows, module_step
from drafters.mtp.stack import ModulePass, MtpStack, draft_modules, first_passes
from specdec.acceptance.judge import choose_greedy, choose_sampled
from specdec.config import EngineConfig
from specdec.execution.eager import Drafter, EagerExecutor
from specdec.execution.readback import HostReads
from specdec.execution.verification import Verification
from specdec.rounds.fields import most_pages, power_of_two
from specdec.rounds.transfer import DeviceRound
from specdec.rounds.verification import DraftArrays, SamplingRound, TargetArrays, Verified
from specdec.target.target import Target


@dataclass(frozen=True)
class ModuleArrays:
    """Host arrays of one draft loop by M modules.

    Attributes:
        rows: [B'] RowTable rows of the first pass; the R drafting ones come first.
        num_drafting: R.
        passes: of each module (token ids [T_m], sources [T_m], last rows [B'], attention).
        steps: attention of drafts 2 … n.
    """

    rows: np.ndarray
    num_drafting: int
    passes: tuple[tuple[np.ndarray, np.ndarray, np.ndarray, HostBatch], ...]
    steps: tuple[HostBatch, ...]


@dataclass(frozen=True)
class ModuleRound:
    """A sent round: its verification, and its draft loop on the device (None when the round has none)."""

    device: DeviceRound
    loop: ModuleLoop | None


@dataclass(frozen=True)
class ModuleLoop:
    """`ModuleArrays` on the device."""

    rows: torch.Tensor
    num_drafting: int
    passes: tuple[ModulePass, ...]
    steps: tuple[CommonAttentionMetadata, ...]


def module_arrays(draft: DraftArrays, num_modules: int) -> ModuleArrays:
    """The arrays of M modules from those of one."""
    first, page_size = draft.first, draft.first.page_size
    passes = [(draft.token_ids, draft.kept.token_indices, draft.kept.last_row, first)]
    for rows in module_rows(first.num_computed_tokens, first.query_lens, num_modules):
        batch = module_batch(rows, first.block_table, page_size)
        passes.append((draft.token_ids[rows.tokens], rows.sources, rows.last_row, batch))
    count, active = draft.num_drafting, draft.steps.steps.active
    lens, table = first.seq_lens[:count], draft.steps.block_table
    num_drafts = active.sum(0) + 1
    steps = (module_step(s, lens, num_drafts, table, page_size, num_modules) for s in range(1, len(active) + 1))
    return ModuleArrays(draft.rows, count, tuple(passes), tuple(steps))


class MtpExecutor:
    """The `Executor` of an `MtpStack`."""

    def __init__(self, target: Target, drafter: Drafter, stack: MtpStack, config: EngineConfig) -> None:
        self._eager = EagerExecutor(target, drafter, config)
        self._stack = stack
        self._runner = drafter.runner
        self._config = config
        buffer = target.tapped(1)
        self._arena = StagingArena(self._fields(), self._bucket(None), buffer.device)
        self._carried = buffer.new_zeros(stack.num_modules, config.max_num_seqs, stack.hidden_size)

    @property
    def transfers(self) -> int:
        """See `Executor.transfers`."""
        return self._eager.transfers + self._arena.generation

    @property
    def reads(self) -> HostReads:
        """See `Executor.reads`."""
        return self._eager.reads

    def verified(self, verified: Verified, round_: ModuleRound) -> Verified:
        """As it is."""
        return verified

    def send(self, draft: DraftArrays | None, target: TargetArrays, sampling: SamplingRound | None) -> ModuleRound:
        """The verification in one copy, the draft loop in another."""
        device = self._eager.send(None, target, sampling)
        if draft is None:
            return ModuleRound(device, None)
        arrays = module_arrays(draft, self._stack.num_modules)
        return ModuleRound(device, _views(arrays, self._arena.send(self._bucket(arrays), dict(_values(arrays)))))

    def draft(self, round_: ModuleRound, tapped: torch.Tensor) -> Draft | None:
        """See `Executor.draft`."""
        loop = round_.loop
        if loop is None:
            return None
        last = first_passes(self._stack, self._runner, tapped, loop.passes, self._carried[:, loop.rows])
        self._carried[:, loop.rows] = last
        if not loop.num_drafting:
            return Draft(loop.rows.new_empty(0, 0), None)
        sampling = round_.device.sampling
        choose = choose_greedy if sampling is None else choose_sampled(sampling, len(sampling.draft_uniform))
        return draft_modules(self._stack, self._runner, last[:, : loop.num_drafting], loop.steps, choose)

    def verify(self, round_: ModuleRound, draft: Draft | None) -> Verification:
        """See `Executor.verify`."""
        return self._eager.verify(round_.device, draft)

    def _batches(self) -> list[str]:
        """Arena names of the batches: first passes m0, m1, …; steps s1, s2, …"""
        passes = [f"m{m}" for m in range(self._stack.num_modules)]
        return passes + [f"s{s}" for s in range(1, self._config.num_speculative_tokens)]

    def _fields(self) -> list[Field]:
        fields = [field for name in self._batches() for field in batch_fields(name)]
        for m in range(self._stack.num_modules):
            fields += [Field(f"m{m}.{name}", np.int64, (f"m{m}.tokens",)) for name in ("token_ids", "sources")]
            fields.append(Field(f"m{m}.last_row", np.int64, ("requests",)))
        return [*fields, Field("rows", np.int64, ("requests",))]

    def _bucket(self, arrays: ModuleArrays | None) -> Bucket:
        """The bucket of a draft loop: rows and tokens rounded up to powers of two; None is the largest there can be."""
        c = self._config
        rows = power_of_two(c.max_num_seqs if arrays is None else len(arrays.rows))
        tokens = power_of_two(c.max_num_batched_tokens if arrays is None else len(arrays.passes[0][0]))
        pages = most_pages(c) if arrays is None else arrays.passes[0][3].block_table.shape[1]
        sizes = {"requests": rows}
        for name in self._batches():
            sizes |= batch_sizes(name, rows, tokens if name.startswith("m") else rows * self._stack.num_modules, pages)
        return bucket_of(**sizes)


def _values(arrays: ModuleArrays) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays under their arena names."""
    yield "rows", arrays.rows
    for m, (token_ids, sources, last_row, batch) in enumerate(arrays.passes):
        yield from batch_arrays(f"m{m}", batch).items()
        yield from ((f"m{m}.token_ids", token_ids), (f"m{m}.sources", sources), (f"m{m}.last_row", last_row))
    for s, batch in enumerate(arrays.steps, 1):
        yield from batch_arrays(f"s{s}", batch).items()


def _views(arrays: ModuleArrays, staged: Staged) -> ModuleLoop:
    passes = (
        ModulePass(
            staged[f"m{m}.token_ids"],
            staged[f"m{m}.sources"],
            staged[f"m{m}.last_row"],
            from_staged(f"m{m}", batch, staged),
        )
        for m, (*_, batch) in enumerate(arrays.passes)
    )
    steps = (from_staged(f"s{s}", batch, staged) for s, batch in enumerate(arrays.steps, 1))
    return ModuleLoop(staged["rows"], arrays.num_drafting, tuple(passes), tuple(steps))
