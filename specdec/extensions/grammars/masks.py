"""GrammarMasks: the extra of requests with a grammar. Their masks are made on the host while the target verifies.

A position's mask follows from its request's committed tokens and the drafts before it. The drafts are read early,
before the verification is launched; the masks are sent before its decision. So a round of such rows has one more read,
and no round is launched before the last one is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from torch import Tensor

from attention.batch.host import BatchExtra
from attention.checking import require
from specdec.requests.grammar import DecidedElsewhere
from specdec.requests.sampling import SamplingParams
from specdec.rounds.extras import EarlyDrafts, RoundExtra, TokenContext
from specdec.rounds.rows import ExtraColumns, RowTable, Schedule
from specdec.rounds.transfer import DeviceRound

if TYPE_CHECKING:
    from specdec.extensions.grammars.following import RequestGrammar
    from specdec.extensions.grammars.grammar_rows import GrammarRows


@dataclass(frozen=True)
class GrammarMasks(RoundExtra):
    """The extra. Rounds without such requests send nothing more and run no other operators.

    Attributes:
        forced: tokens that must come next are given to rows as drafts. greedy: only to rows of greedy requests.
    """

    forced: bool
    greedy: bool
    rewrites: ClassVar[bool] = True
    reads_drafts: ClassVar[bool] = True
    serves: ClassVar[str] = "grammar"

    @property
    def limits_drafts(self) -> bool:
        """See `RoundExtra.limits_drafts`: as with forced drafts, where one process decides."""
        return self.forced

    def columns(self, max_rows: int) -> GrammarColumns:
        """See `RoundExtra.columns`."""
        return GrammarColumns(max_rows, self.forced, self.greedy)

    def prepared(self, params: SamplingParams, context: TokenContext, prompt_ids: Sequence[int]) -> SamplingParams:
        """See `RoundExtra.prepared`: with the grammar as the request follows it."""
        if params.grammar is None or isinstance(params.grammar, DecidedElsewhere):
            return params
        from specdec.extensions.grammars.following import followed

        return replace(params, grammar=followed(params.grammar, context, params.ignore_eos, prompt_ids))

    def rewrite(self, logits: Tensor, round_: DeviceRound, own: Any, drafts: EarlyDrafts | None) -> Tensor:
        """See `RoundExtra.rewrite`: -inf for tokens that may not come."""
        from specdec.extensions.grammars.grammar_rows import masked

        return masked(logits, round_, own, drafts)

    def reads(self, own: Any) -> bool:
        """See `RoundExtra.reads`."""
        return bool((own.counts > 1).any())

    def limit(self, logits: Tensor, own: Any, target_ids: Tensor, vocab_size: int) -> Tensor:
        """See `RoundExtra.limit`. A row stays unchanged if the head can draft none of its allowed tokens."""
        from specdec.extensions.grammars.grammar_rows import first_masked

        return first_masked(logits, own, target_ids, vocab_size)


class GrammarColumns(ExtraColumns):
    """The grammar of each row's request."""

    def __init__(self, max_rows: int, forced: bool, greedy: bool) -> None:
        """forced, greedy: see `GrammarMasks`."""
        self._forced = forced
        self._greedy = greedy
        self._gives = np.zeros(max_rows, np.bool_)
        self._grammars: list[RequestGrammar | None] = [None] * max_rows
        self.idle = True

    def open(self, table: RowTable, row: int, params: SamplingParams) -> None:
        """See `ExtraColumns.open`."""
        if params.grammar is None:
            return
        table.read_first(row)
        if not isinstance(params.grammar, DecidedElsewhere):
            self.idle = False
            own = self._grammars[row] = cast("RequestGrammar", params.grammar)  # as `GrammarMasks.prepared` made it
            own.prompt_len = int(table.prompt[row])
            own.ends = (*(int(i) for i in table.eos[row] if i >= 0), *params.stop_token_ids)
            self._gives[row] = self._forced and table.drafts[row] and not (self._greedy and params.temperature)
            self.give_forced(table, row)

    def close(self, row: int) -> None:
        """See `ExtraColumns.close`."""
        self._grammars[row] = None

    def commit(
        self, table: RowTable, rows: np.ndarray, committed: BatchExtra | None, notes: Sequence[np.ndarray]
    ) -> None:
        """See `ExtraColumns.commit`."""
        if self._forced and not self.idle:
            for row in rows.tolist():
                self.give_forced(table, row)

    def give_forced(self, table: RowTable, row: int) -> None:
        """Give a decoding row the tokens that must come next; without any it keeps the drafts that others gave."""
        grammar = self._grammars[row]
        length = table.length[row]
        if grammar is None or not self._gives[row] or table.computed[row] < table.prefill[row]:
            return
        if grammar.vocabulary is not None:  # user matchers are used only for masks
            grammar.follow(table.tokens[row, grammar.prompt_len : length].tolist())
        forced = grammar.forced() or grammar.ends[: grammar.is_over]
        if forced:
            table.give(row, forced[: int(table.drafts[row])], True)
        table.await_drafts(row)

    def scheduled(self, table: RowTable, schedule: Schedule) -> GrammarRows | None:
        """See `ExtraColumns.scheduled`."""
        decided = np.flatnonzero(table.computed[schedule.rows] + schedule.num_new == table.length[schedule.rows])
        places = [int(place) for place in decided if self._grammars[schedule.rows[place]] is not None]
        new_ids = [table.tokens[row, table.prompt[row] : table.length[row]].tolist() for row in schedule.rows[places]]
        return self._rows(schedule, decided, places, new_ids)

    def after(
        self,
        table: RowTable,
        last: BatchExtra | None,
        schedule: Schedule,
        start: np.ndarray,
        num_accepted: np.ndarray,
        tokens: np.ndarray | None,
    ) -> GrammarRows | None:
        """See `ExtraColumns.after`."""
        if last is None:
            return None
        require(tokens is not None, "a round of rows with a grammar was launched before the last one was read")
        assert tokens is not None
        places = [place for place in range(len(start)) if self._grammars[schedule.rows[place]] is not None]
        new_ids = []
        for place in places:
            row = schedule.rows[place]
            count = num_accepted[place]
            known = table.tokens[row, table.prompt[row] : start[place] - count].tolist()
            new_ids.append(known + tokens[place, : count + 1].tolist())
        return self._rows(schedule, np.arange(len(start)), places, new_ids)

    def _rows(
        self, schedule: Schedule, decided: np.ndarray, places: list[int], new_ids: list[list[int]]
    ) -> GrammarRows | None:
        if not places:
            return None
        from specdec.extensions.grammars.grammar_rows import GrammarRows

        found = tuple(g for row in schedule.rows[places] if (g := self._grammars[row]) is not None)
        return GrammarRows(found, tuple(new_ids), np.searchsorted(decided, places), schedule.num_drafts[places] + 1)


def grammar_extras(one_process: bool, greedy: bool) -> tuple[RoundExtra, ...]:
    """See `specdec.rounds.extras.MakeExtras`. Several processes force no drafts: the first alone has masks."""
    return (GrammarMasks(one_process, greedy),)
