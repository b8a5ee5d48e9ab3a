"""TokenLoop: the draft loop of a small causal language model, which reads tokens and none of the target's states.

A head that reads the target's state at p with the token at p+1 stops before the bonus token's position seq'. This model
must read the bonus token itself, at seq', for draft 1, and draft s at seq'+s for draft s+1: one position further.

Its draft prefill reads what the verification read and was accepted, and of drafting rows the bonus token. So it reads
the bonus token of the round before once more, writing the same keys and values: then it needs to know nothing of
earlier rounds, and prompts, reused pages and preempted requests are no special cases. What drafts wrote that were
rejected is at seq' or later; it is overwritten before a later token attends to it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
from torch import Tensor

from attention.batch.host import rows_batch, starts_of
from attention.runner import GroupRunner
from attention.staging import Sizes
from drafters.loops.base import Choose, Compile, Draft, DraftInput, FixedLoop, Greedy, LoopSize
from drafters.loops.chain import DraftArrays, DraftInputs, DraftSection, run_steps
from drafters.loops.head_passes import TokenReader
from drafters.loops.prefill import HostPass, accepted_rows
from drafters.loops.steps import step_arrays


def token_prefill(draft: DraftInput) -> HostPass:
    """The draft prefill of a round for a model that reads tokens; its `sources` are not read.

    A prompt row of which 3 tokens were read, and a verification at position 2 that accepted 1 of 3 drafts, so that its
    bonus token is at position 4:

    >>> tokens = np.array([[10, 11, 12, 13, 0, 0], [20, 21, 22, 23, 24, 0]])
    >>> table, n = np.array([[5, 0], [7, 9]], np.int32), np.array([2])
    >>> draft = DraftInput(np.array([0, 3, 7]), np.array([0, 3]), np.array([0, 1]), np.array([1, 0]),
    ...                    np.array([1, 0]), np.array([4, 3]), tokens, n, table[[1, 0]], 16)
    >>> arrays = token_prefill(draft)
    >>> arrays.token_ids.tolist(), arrays.batch.positions.tolist(), arrays.last_row.tolist()
    ([22, 23, 24, 10, 11, 12], [2, 3, 4, 0, 1, 2], [2, 5])
    """
    accepted = accepted_rows(draft.query_start_loc, draft.num_drafts, draft.num_accepted, draft.order)
    lens = np.diff(accepted.query_start_loc)
    first_positions = draft.committed_lens - lens
    lens[: len(draft.num_drafts_next)] += 1  # the bonus token
    query_start_loc = starts_of(lens)
    batch = rows_batch(query_start_loc, first_positions, draft.block_table, draft.page_size)
    token_ids = draft.tokens[np.repeat(draft.request_rows, lens), batch.positions].astype(np.int64)
    return HostPass(token_ids, np.zeros_like(token_ids), query_start_loc[1:] - 1, batch=batch)


class TokenSection(DraftSection):
    """The places of a chain's arrays, with one token more for each row of the draft prefill: `LoopSize` counts the
    tokens of a verification."""

    def sizes(self, size: LoopSize) -> Sizes:
        return super().sizes(replace(size, tokens=size.tokens + size.rows))


class TokenLoop:
    """The draft loop of one small model; a `drafters.loops.base.GraphLoop` that `SharesPages` and `ReadsBonus`."""

    name = "small draft models"
    num_modules = 1
    num_following = 1
    """Its entries depend on no following token; the least that the prefix cache knows is 1."""
    reads_bonus = True

    def __init__(self, head: TokenReader) -> None:
        self.section = TokenSection(1)
        self._head = head

    def arrays(self, draft: DraftInput) -> DraftArrays:
        """All arrays of a round; step s reads draft s at seq'+s."""
        prefill = token_prefill(draft)
        rows = draft.drafting
        steps = step_arrays(replace(rows, committed_lens=rows.committed_lens + 1))
        count, pages = draft.block_table.shape
        tokens = len(prefill.token_ids)
        drafting = len(rows.num_drafts)
        size = LoopSize(count, tokens - drafting, pages, len(steps.batches) + 1)
        return DraftArrays(size, draft.request_rows, drafting, (prefill,), steps)

    def run(self, inputs: DraftInputs, runner: GroupRunner, aux: Tensor, choose: Choose) -> Draft:
        """Draft 1 comes from the bonus token, which the draft prefill reads last, drafts 2 … n from the one before."""
        (own,) = inputs.passes
        with self._head.attending(partial(runner.attend, runner.plan(own.metadata))):
            last = self._head.read(own.token_ids, own.metadata.positions, own.last_row)
        return run_steps((self._head,), runner, [last], inputs, choose)

    def fixed_form(
        self, runner: GroupRunner, aux: Tensor, limits: LoopSize, greedy: Greedy, compiler: Compile
    ) -> FixedLoop:
        """See `GraphLoop.fixed_form`."""
        from drafters.loops.fixed_forms import FixedTokens  # late: only rounds from graphs need it

        return FixedTokens(self._head, runner, aux, limits, greedy, compiler)
