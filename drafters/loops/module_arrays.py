"""Host arrays of several multi-token-prediction modules (M > 1): which rows and tokens each module reads. numpy only.

Row i of module m combines the token at i+1+m with module m-1's output at row i (m = 0: with the target's state), so it
is final once the token at i+1+m is committed. A new range [a, seq') of target states gives rows [a-m, seq'-m) of module
m, which has a cache layer of its own. Rows below 0, or below the position at which a request with reused pages begins,
do not exist. Row a-m needs module m-1's output at a row of the previous round: one carried vector a request and module.

Draft s+1 comes from module m = s mod M. While s < M it reads the rows seq'-s … seq'-1 with the tokens d_1 … d_s. After
that the modules take turns again (lap l = s // M): each reads the M rows that end at seq'+l·M-1 with the tokens
d_{s-M+1} … d_s, and instead of the target's state at row i the last module's output at row i-M of the previous lap.
For M = 1 this is the chain of `drafters.loops.chain_arrays.draft_steps`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np
import torch

from attention.batch.host import HostBatch, rows_batch
from attention.batch.metadata import BatchArrays, BatchSection, CommonAttentionMetadata
from attention.checking import CHECKS
from attention.staging import A, Section, Staged, array
from drafters.loops.base import DraftInput, LoopSize
from drafters.loops.chain_arrays import DevicePass, HostPass, PassRows, prefill_arrays


@dataclass(frozen=True)
class ModuleRows:
    """Rows of module m >= 1 in a draft prefill over B' requests whose module 0 reads T' rows.

    Attributes:
        lens, first_positions: [B'] number of rows of each request, 0 if it has none yet, and the first one's position.
        tokens: [T_m] int64, the row of module 0 that reads the same token.
        sources: [T_m] int64, indices into [B' carried vectors, T_{m-1} outputs of module m-1].
        last_row: [B'] int64, each request's last row; 0 where it has none.
    """

    lens: np.ndarray
    first_positions: np.ndarray
    tokens: np.ndarray
    sources: np.ndarray
    last_row: np.ndarray


def module_rows(
    first_positions: np.ndarray, lens: np.ndarray, num_modules: int, begins: np.ndarray | None = None
) -> tuple[ModuleRows, ...]:
    """The rows of modules 1 … M-1 for new ranges [a, a + len) of module 0.

    Args:
        first_positions: [B'] a; lens: [B'] rows of module 0, at least 1 each.
        begins: [B'] the position before which a request has no rows; None for 0.

    Two requests, a = 5 with three new rows and a = 0 with two (a prompt's start):

    >>> (m,) = module_rows(np.array([5, 0]), np.array([3, 2]), 2)
    >>> m.first_positions.tolist(), m.lens.tolist(), m.tokens.tolist()
    ([4, 0], [3, 1], [0, 1, 2, 4])
    >>> m.sources.tolist(), m.last_row.tolist()  # 0, 1 are the carried vectors, 2 … 6 module 0's outputs
    ([0, 2, 3, 5], [2, 3])

    The first of them once more, when it begins at 5:

    >>> (m,) = module_rows(np.array([5]), np.array([3]), 2, np.array([5]))
    >>> m.first_positions.tolist(), m.lens.tolist(), m.tokens.tolist(), m.sources.tolist()
    ([5], [2], [1, 2], [1, 2])
    """
    least = np.zeros_like(lens) if begins is None else begins
    stop = first_positions + lens
    starts = np.concatenate([[0], np.cumsum(lens)])
    ends = starts[1:]
    before, rows = (first_positions, starts), []
    for m in range(1, num_modules):
        first = np.maximum(first_positions - m, least)
        count = np.maximum(stop - m, least) - first
        starts = np.concatenate([[0], np.cumsum(count)])
        owner = np.repeat(np.arange(len(count)), count)
        within = np.arange(starts[-1]) - starts[owner]
        place = first[owner] + within - before[0][owner]  # -1: the row before module m-1's first
        rows.append(
            ModuleRows(
                lens=count,
                first_positions=first,
                tokens=(ends - count)[owner] + within,
                sources=np.where(place < 0, owner, len(lens) + before[1][owner] + place),
                last_row=np.maximum(starts[1:] - 1, 0),
            )
        )
        before = first, starts
    return tuple(rows)


def module_batch(rows: ModuleRows, block_table: np.ndarray, page_size: int) -> HostBatch:
    """A module's attention in the draft prefill, without requests that have no rows. block_table: [B', P]."""
    some = rows.lens > 0
    query_start_loc = np.concatenate([[0], np.cumsum(rows.lens[some])])
    return rows_batch(query_start_loc, rows.first_positions[some], block_table[some], page_size)


def shifted_batch(
    module: int,
    query_start_loc: np.ndarray,
    first_positions: np.ndarray,
    block_table: np.ndarray,
    page_size: int,
    begins: np.ndarray | None = None,
) -> HostBatch:
    """Module m's attention over all token rows of a verification, at positions m less than the target's.

    Rows before a request's beginning do not exist: they become a separate row on the null page.

    Args:
        query_start_loc: [B+1]; first_positions: [B] of the verification; block_table: [B, P] of the head's pages.
        begins: [B] first positions of the requests, see `module_rows`.

    Three requests, at 5 with three tokens, at 0 with two, and at 0 with one:

    >>> batch = shifted_batch(1, np.array([0, 3, 5, 6]), np.array([5, 0, 0]), np.array([[7], [8], [9]]), 16)
    >>> batch.query_start_loc.tolist(), batch.positions.tolist(), batch.block_table[:, 0].tolist()
    ([0, 3, 4, 5, 6], [4, 5, 6, 0, 0, 0], [7, 0, 8, 0])

    The first of them once more, when it begins at 5:

    >>> batch = shifted_batch(1, np.array([0, 3]), np.array([5]), np.array([[7]]), 16, np.array([5]))
    >>> batch.query_start_loc.tolist(), batch.positions.tolist(), batch.block_table[:, 0].tolist()
    ([0, 1, 3], [0, 5, 6], [0, 7])
    """
    lens = np.diff(query_start_loc)
    least = np.zeros_like(lens) if begins is None else begins
    missing = np.clip(module - (first_positions - least), 0, lens)
    first = np.maximum(first_positions - module, least)
    if not missing.any():
        return rows_batch(query_start_loc, first, block_table, page_size)
    split = np.stack([missing, lens - missing], 1).reshape(-1)
    exists = np.tile([False, True], len(lens))
    some = split > 0
    return rows_batch(
        np.concatenate([[0], np.cumsum(split[some])]),
        np.where(exists, np.repeat(first, 2), 0)[some],
        np.where(exists[:, None], np.repeat(block_table, 2, axis=0), 0)[some],
        page_size,
    )


def rows_before(query_start_loc: np.ndarray, num_carried: int) -> np.ndarray:
    """[T] int64, index of the row before each token row in [carried vectors, T rows]; before a request's first token
    row comes its carried vector.

    Args:
        query_start_loc: [B+1], no request without tokens; num_carried: number of vectors, at least B.

    >>> rows_before(np.array([0, 3, 5]), 4).tolist()
    [0, 4, 5, 1, 7]
    """
    sources = np.arange(num_carried - 1, num_carried - 1 + query_start_loc[-1])
    sources[query_start_loc[:-1]] = np.arange(len(query_start_loc) - 1)
    return sources


def step_width(step: int, num_modules: int) -> int:
    """Rows a request has in draft step+1 (step 1, 2, …): min(step, M)."""
    return min(step, num_modules)


def module_step(
    step: int,
    committed_lens: np.ndarray,
    num_drafts: np.ndarray,
    block_table: np.ndarray,
    page_size: int,
    num_modules: int,
) -> HostBatch:
    """The attention of draft step+1, which module step mod M makes.

    Requests that do not take the step, or are too short for it, use the null page.

    Args:
        committed_lens: [R] seq'; num_drafts: [R] n_i; block_table: [R, P].

    M = 2, two requests; draft 2 by module 1, draft 3 by module 0 again, draft 4 by module 1:

    >>> table, n = np.array([[7, 9], [3, 4]]), np.array([4, 3])
    >>> [module_step(s, np.array([18, 7]), n, table, 16, 2).positions.tolist() for s in (1, 2, 3)]
    [[17, 6], [18, 19, 7, 8], [18, 19, 0, 1]]
    """
    width = step_width(step, num_modules)
    active = (num_drafts > step) & (committed_lens >= width)
    first = np.where(active, committed_lens + step // num_modules * num_modules - width, 0)
    query_start_loc = np.arange(len(first) + 1) * width
    return rows_batch(query_start_loc, first, np.where(active[:, None], block_table, 0), page_size)


@dataclass(frozen=True)
class ModuleArrays:
    """Host arrays of a draft loop of M modules; a `drafters.loops.base.LoopArrays`.

    Attributes:
        request_rows: [B'] int64, see `DraftInput`; the R drafting ones come first.
        num_drafting: R.
        passes: one per module. steps: attention of drafts 2 … n.
    """

    request_rows: np.ndarray
    num_drafting: int
    passes: tuple[HostPass, ...]
    steps: tuple[HostBatch, ...]

    @property
    def size(self) -> LoopSize:
        first = self.passes[0]
        pages = first.batch.block_table.shape[1]
        return LoopSize(len(self.request_rows), len(first.token_ids), pages, len(self.steps) + 1)


def module_arrays(draft: DraftInput, num_modules: int) -> ModuleArrays:
    """All arrays of M modules."""
    prefill = prefill_arrays(draft)
    first, page_size, passes = prefill.batch, draft.page_size, [prefill]
    for rows in module_rows(first.num_computed_tokens, first.query_lens, num_modules, draft.begins):
        batch = module_batch(rows, first.block_table, page_size)
        passes.append(HostPass(prefill.token_ids[rows.tokens], rows.sources, rows.last_row, batch=batch))
    own = draft.drafting
    steps = (
        module_step(s, own.committed_lens, own.num_drafts, own.block_table, page_size, num_modules)
        for s in range(1, own.num_steps + 1)
    )
    return ModuleArrays(draft.request_rows, len(own.num_drafts), tuple(passes), tuple(steps))


@dataclass(frozen=True)
class _Requests(Generic[A]):
    request_rows: A = array(np.int64, "requests")


@dataclass(frozen=True)
class ModuleInputs:
    """`ModuleArrays` on the device."""

    request_rows: torch.Tensor
    num_drafting: int
    passes: tuple[DevicePass, ...]
    steps: tuple[CommonAttentionMetadata, ...]


class ModuleSection:
    """Places the arrays of M modules, for up to K drafts, in the round's arena; a `drafters.loops.base.LoopSection`."""

    def __init__(self, num_modules: int, num_drafts: int) -> None:
        self._num_modules, requests = num_modules, {"rows": "modules.requests"}
        names = [f"modules.prefill{m}" for m in range(num_modules)]
        self._requests = Section(_Requests, "modules")
        self._batches = [BatchSection(name) for name in names]
        self._rows = [Section(PassRows, name, shared=requests) for name in names]
        self._steps = [BatchSection(f"modules.step{s}") for s in range(1, num_drafts)]
        sections: list[Any] = [self._requests, *self._batches, *self._rows, *self._steps]
        self.fields = tuple(place for section in sections for place in section.fields)

    def sizes(self, size: LoopSize) -> dict[str, int]:
        sizes = {"modules.requests": size.rows}
        for batch in self._batches:
            sizes |= batch.sizes(size.rows, size.tokens, size.pages)
        for s, step in enumerate(self._steps, 1):
            rows = size.rows if s <= size.steps else 0
            sizes |= step.sizes(rows, rows * step_width(s, self._num_modules), size.pages)
        return sizes

    def values(self, arrays: ModuleArrays) -> dict[str, np.ndarray]:
        found = self._requests.values(arrays)
        for batch, rows, each in zip(self._batches, self._rows, arrays.passes, strict=True):
            found |= batch.values(each.batch) | rows.values(each)
        for step, own in zip(self._steps, arrays.steps, strict=False):
            found |= step.values(own)
        return found

    def of(self, arrays: ModuleArrays, staged: Staged) -> ModuleInputs:
        sections = zip(self._batches, self._rows, arrays.passes, strict=True)
        passes = tuple(
            rows.of(staged.views, DevicePass, metadata=batch.metadata(each.batch, staged))
            for batch, rows, each in sections
        )
        steps = tuple(step.metadata(own, staged) for step, own in zip(self._steps, arrays.steps, strict=False))
        return ModuleInputs(self._requests.of(staged.views).request_rows, arrays.num_drafting, passes, steps)


_PER_STEP = ("query_start_loc", "seq_lens", "page_indices", "page_indptr", "last_page_len")


class FixedStepSection:
    """Places all steps of M modules in a separate arena, for rounds of one fixed shape.

    Their arrays form one batch with the step as first dimension; slots and positions are flat, step after step.
    """

    def __init__(self, rows: int, widths: Sequence[int]) -> None:
        """widths: tokens a row of every step."""
        self._rows = rows
        self.tokens = token_slices(rows, widths)
        leading = dict.fromkeys(_PER_STEP, "modules.steps")
        self._own = Section(BatchArrays, "modules.steps", ("block_table",), leading=leading)
        self.fields = self._own.fields

    def sizes(self, page_entries: int) -> dict[str, int]:
        """Sizes of the symbolic dimensions of `fields`."""
        return {
            "modules.steps": len(self.tokens),
            "modules.steps.rows": self._rows,
            "modules.steps.rows_plus_1": self._rows + 1,
            "modules.steps.entries": page_entries,
            "modules.steps.tokens": self.tokens[-1].stop if self.tokens else 0,
        }

    def buffers(self, host: Mapping[str, np.ndarray]) -> BatchArrays[np.ndarray]:
        """The arrays over one of the arena's host buffers."""
        return self._own.of(host)

    def of(self, batches: Sequence[HostBatch], staged: Staged) -> tuple[CommonAttentionMetadata, ...]:
        """Attention metadata of every step."""
        whole: BatchArrays[torch.Tensor] = self._own.of(staged.views)
        steps = []
        for step, (host, tokens) in enumerate(zip(batches, self.tokens, strict=True)):
            if CHECKS.on:
                host.validate()
            own = {name: getattr(whole, name)[step] for name in _PER_STEP}
            own |= {name: getattr(whole, name)[tokens] for name in ("slot_mapping", "positions")}
            steps.append(CommonAttentionMetadata(host=host, staged=staged, **own))
        return tuple(steps)


def token_slices(rows: int, widths: Sequence[int]) -> tuple[slice, ...]:
    """Slices of each step's tokens among the tokens of all steps; widths: tokens a row of every step.

    >>> token_slices(4, [1, 2])
    (slice(0, 4, None), slice(4, 12, None))
    """
    stops = [rows * sum(widths[: i + 1]) for i in range(len(widths))]
    return tuple(slice(stop - rows * width, stop) for stop, width in zip(stops, widths, strict=True))
