"""A request from submission to completion, and the call that it belongs to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple

import numpy as np
import torch

from attention.errors import named_error
from specdec.errors import ModelChangedError, RequestFailedError, SpecdecError
from specdec.interrupts import raised_again, raised_twice
from specdec.requests.logprobs import PromptLogprobs, TokenLogprobs, TokenRows, of_notes
from specdec.requests.sampling import SamplingParams
from specdec.requests.shown import tau_words
from specdec.requests.stats import AcceptanceStats, RequestStats, RoundRecord, pool
from specdec.requests.text import TextStream
from specdec.requests.user_code import RequestCriteria, UserCodeError
from specdec.values import TokenIds

_MOST_LETTERS = 60
FinishReason = Literal["eos", "stop", "length", "timeout", "cancelled"]


@dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
        text: `tokenizer.decode(token_ids, skip_special_tokens=True)`, cut before a stop string.
        token_ids: new tokens, the eos id or the token that completed a stop string included.
        prompt_token_ids: the prompt as the model read it.
        finish_reason: "eos" (an eos id), "stop" (a stop string, one of stop_token_ids or a stopping criterion),
            "length" (a limit), "timeout" (max_time), "cancelled" (`Stream.cancel`).
        stats: the request's rounds and times.
        drafts: draft ids of every recorded round, when SamplingParams.return_drafts was set.
        sample_index: which of the prompt's `SamplingParams.n` completions this is, from 0.
        logprobs: of each token, when SamplingParams.logprobs was set.
        prompt_logprobs: of each prompt token, when SamplingParams.prompt_logprobs was set: None for the first one, for
            those before prompt_logprobs_start, and for those that a request which ended early had not read.
        logits: [new tokens, V] float32, when return_logits was set.
        scores: the same, when return_scores was set.
        truncated_by: "max_model_len" where the request ended there, before its own max_new_tokens; else None.
        grammar_started: whether its grammar applied to any token: False where its begin marker never came; None without
            a grammar.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    stats: RequestStats
    drafts: tuple[TokenIds, ...] | None = None
    sample_index: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    logits: np.ndarray | None = field(default=None, repr=False, compare=False)
    scores: np.ndarray | None = field(default=None, repr=False, compare=False)
    truncated_by: Literal["max_model_len"] | None = None
    grammar_started: bool | None = None

    @property
    def pooled(self) -> AcceptanceStats:
        """Acceptance over this request's rounds."""
        return pool(self.stats.rounds)

    def __repr__(self) -> str:
        plain = " ".join(self.text.split())
        shown = plain if len(plain) <= _MOST_LETTERS else f"{plain[: _MOST_LETTERS - 1]}…"
        words = f"{len(self.token_ids)} tokens, {self.finish_reason}, {tau_words(self.pooled.tau)}"
        return f"Completion({shown!r}, {words})"


Ended = tuple[int, Completion]
"""A completion, after its place in the call."""


class Progress(NamedTuple):
    """How much of a request was reported: new tokens, recorded rounds, characters of text. It continues from there
    after an interrupt."""

    num_tokens: int = 0
    num_rounds: int = 0
    num_characters: int = 0


NOTHING_YET = Progress()


@dataclass(frozen=True)
class Update:
    """New tokens and text of one request, from one round.

    Attributes:
        request_id: as returned by `Engine.submit`.
        token_ids: new tokens; text: new text, complete characters only, never part of a stop string. All texts of a
            request joined are the completion's text.
        completion: set when the request is finished.
        error: set when the request failed; it is ended.
        progress: how much of the request has been reported with this update.
        logprobs: of its token_ids, where requested.
    """

    request_id: int
    token_ids: list[int]
    text: str
    completion: Completion | None = None
    error: SpecdecError | None = None
    progress: Progress = NOTHING_YET
    logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def last(self) -> bool:
        """Whether the request is ended here."""
        return self.completion is not None or self.error is not None


class RowRound(NamedTuple):
    """One request's result of one verification: tokens committed, drafts accepted (before trimming), draft ids.

    notes: [n+1, W] of the tokens, see `specdec.requests.logprobs.of_notes`; None where the round has none.
    """

    token_ids: list[int]
    num_accepted: int
    drafts: TokenIds
    notes: np.ndarray | None = None


@dataclass
class Times:
    """Moments (time.perf_counter seconds) of a request's life."""

    submitted: float
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


@dataclass(eq=False)
class Request:
    """A request inside the engine, compared by identity. `row` is its RowTable row, -1 while it waits.

    `committed` holds its tokens while it waits (the prompt, and after a preemption also what it emitted). `progress` is
    how much was reported. `variant`: of its keys and values, see `specdec.rounds.extras.RoundExtra`; decided when it
    gets a row. `has_pages`: it waits, and its keys and values are in pages already; `leaves`: it leaves the batch with
    its first token (see `specdec.engine.guests`). Of two requests that wait for their first row the one with the lower
    `turn` gets it first. `batch`: the same for requests that were queued together; else its own id.
    """

    id: int
    params: SamplingParams
    prompt_len: int
    limit: int
    num_drafts: int
    key: int
    committed: np.ndarray
    stream: TextStream
    sample_index: int
    eos_token_ids: TokenIds
    times: Times
    row: int = -1
    variant: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    new_tokens: list[int] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    drafts: list[TokenIds] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    progress: Progress = NOTHING_YET
    has_pages: bool = False
    leaves: bool = False
    turn: int = -1
    batch: int = -1

    def __post_init__(self) -> None:
        """A batch of its own where none is given."""
        self.batch = self.id if self.batch < 0 else self.batch

    @property
    def shareable(self) -> int:
        """Tokens of it that may be found in the prefix cache: positions whose logits it needs are read by itself."""
        asked = self.params.prompt_logprobs
        if isinstance(asked, PromptLogprobs) and asked.next_row < self.prompt_len - 1:
            return asked.next_row + 1
        return len(self.committed)

    def rewind(self) -> None:
        """Reset to the reported tokens, waiting; later tokens are generated again."""
        self.give_back(self.progress.num_tokens, self.progress.num_rounds, None)
        self.row = -1
        self.has_pages = False
        self.committed = np.append(self.committed[: self.prompt_len], np.array(self.new_tokens, np.int32))

    def give_back(self, num_tokens: int, num_rounds: int, finish_reason: FinishReason | None) -> None:
        """Back to where it had so many new tokens and rounds, before a round's were taken in part or as a whole."""
        del self.new_tokens[num_tokens:]
        del self.logprobs[num_tokens:]
        del self.rounds[num_rounds:]
        del self.drafts[num_rounds:]
        self.finish_reason = finish_reason
        self.stream.rewind(self.new_tokens, self.progress.num_characters)

    def take(self, round_: RowRound, now: float) -> Update:
        """Append a round's tokens; find stop ids and stop strings; finish when the row has ended.

        Tokens after a stop are dropped. Raises UserCodeError: see `SamplingParams.error_at`, for one of the tokens.
        """
        own = self.params
        new_tokens = self.new_tokens
        before = len(new_tokens)
        new_tokens += round_.token_ids
        known = len(new_tokens)
        ids = own.stop_token_ids
        at_id = None
        if ids:
            at_id = next((i + 1 for i in range(before, known) if new_tokens[i] in ids), None)
        end = self.stream.push(new_tokens, at_id or known) or at_id
        if own.stopping_criteria is not None:
            end = self._at_criterion(before, end or known) or end
        if end is not None:
            del new_tokens[end:]
            self.finish_reason = "stop"
        if not own.logits_processor is own.prefix_allowed_tokens_fn is own.grammar is own.watch is None:
            errors = (own.error_at(self.prompt_len + place) for place in range(before, len(new_tokens)))
            if (error := next(filter(None, errors), None)) is not None:
                raise error
        emitted = len(new_tokens) - before
        if own.logprobs is not None and round_.notes is not None:
            each = zip(new_tokens[before:], round_.notes, strict=False)
            self.logprobs += [of_notes(token, notes, own.logprobs) for token, notes in each]
        if not before:  # from prefill, which verifies nothing and so is no recorded round
            self.times.first_token = now
        else:
            self.rounds.append(RoundRecord(len(round_.drafts), round_.num_accepted, emitted))
            self.drafts.append(round_.drafts)
        tokens = new_tokens[self.progress.num_tokens :]  # this round's, and those that the request came with
        if self.finish_reason is None:
            text = self.stream.show()
            progress = Progress(len(new_tokens), len(self.rounds), self.stream.num_shown)
            new = None if own.logprobs is None else tuple(self.logprobs[self.progress.num_tokens :])
            return Update(self.id, tokens, text, progress=progress, logprobs=new)
        self.times.finished = now
        return self._last_update()

    def end_early(self, reason: FinishReason, now: float, reported: Progress) -> Update:
        """End it with the tokens that it has. reported: how much of it has been, with this round's updates."""
        self.finish_reason = reason
        self.times.finished = now
        self.progress = reported
        if not self.times.admitted:
            self.times.admitted = now
        if not self.new_tokens:
            self.times.first_token = now
        return self._last_update()

    def _at_criterion(self, before: int, end: int) -> int | None:
        """New tokens up to the first with which a stopping criterion is met, of those after `before` up to `end`."""
        own = self.params.stopping_criteria
        if not isinstance(own, RequestCriteria):
            return None
        tokens = np.append(self.committed[: self.prompt_len], np.array(self.new_tokens[:end], np.int32))
        length = own.first_end(tokens, self.prompt_len + before)
        if length is None or (length - self.prompt_len == len(self.new_tokens) and self.finish_reason is not None):
            return None  # the last token ends it anyway
        met = length - self.prompt_len
        if met < end:  # as if later tokens had not been read
            self.stream.rewind(self.new_tokens[:met], self.progress.num_characters)
        return met

    def _last_update(self) -> Update:
        reported = self.progress.num_tokens
        new = None if self.params.logprobs is None else tuple(self.logprobs[reported:])
        text, rest = self.stream.finish(self.new_tokens)
        return Update(self.id, self.new_tokens[reported:], rest, self._completion(text), logprobs=new)

    def _completion(self, text: str) -> Completion:
        t = self.times
        stats = RequestStats(
            rounds=tuple(self.rounds),
            prompt_tokens=self.prompt_len,
            new_tokens=len(self.new_tokens),
            queue_s=t.admitted - t.submitted,
            prefill_s=t.first_token - t.admitted,
            decode_s=t.finished - t.first_token,
            preemptions=self.preemptions,
            prefix_hit_tokens=self.prefix_hit_tokens,
            cached_tokens=self.cached_tokens,
            not_drafted=self.params.not_drafted,
        )
        assert self.finish_reason is not None
        params = self.params
        count = len(self.new_tokens)
        asked = params.prompt_logprobs
        rows = (params.return_logits, params.return_scores)
        started = getattr(params.grammar, "started", None)  # what decides in another process does not say it
        cut = self.finish_reason == "length" and count < params.max_new_tokens
        logits, scores = (r.stacked(self.prompt_len, count) if isinstance(r, TokenRows) else None for r in rows)
        if scores is not None and params.renormalize_logits:
            scores = torch.from_numpy(scores).log_softmax(-1).numpy()
        return Completion(
            text=text,
            token_ids=list(self.new_tokens),
            prompt_token_ids=self.committed[: self.prompt_len].tolist(),
            finish_reason=self.finish_reason,
            stats=stats,
            drafts=tuple(self.drafts) if self.params.return_drafts else None,
            sample_index=self.sample_index,
            logprobs=None if params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=asked.of_prompt(self.prompt_len) if isinstance(asked, PromptLogprobs) else None,
            logits=logits,
            scores=scores,
            truncated_by="max_model_len" if cut else None,
            grammar_started=None if started is None else started(self.new_tokens),
        )


class Call:
    """The requests of one call, and their updates.

    Attributes:
        places: request id -> index in the call, of the requests that are not ended.
        inbox: updates, and None to wake the sleeping caller.
        num_requests: queued so far. refusal: why the call cannot be served, found during its first round.
        made: creation time, in time.perf_counter seconds. has_thread: a dedicated thread reads the call; a forked
            process does not have that thread.
    """

    def __init__(self, has_thread: bool = False) -> None:
        self.refusal: SpecdecError | None = None
        self.places: dict[int, int] = {}
        self.inbox = SimpleQueue[Update | None]()
        self._last: dict[int, Update] = {}
        self.num_requests = 0
        self.made = time.perf_counter()
        self.has_thread = has_thread

    @property
    def is_ready(self) -> bool:
        """Whether its caller has an update to read, or nothing left to wait for."""
        return not self.places or not self.inbox.empty()

    def take(self, timeout: float = 0.0) -> Update | None:
        """The next update; None if none arrives within `timeout` seconds or the call is woken."""
        try:
            update = self.inbox.get(timeout > 0, timeout)
        except Empty:
            return None
        if update is None or self._last.get(update.request_id) is update:
            return None  # an interrupted delivery was repeated
        if update.last:
            self._last.pop(update.request_id, None)  # a repetition has no place any more: see `SharedEngine.next`
        else:
            self._last[update.request_id] = update
        return update

    def end(self, request_id: int) -> None:
        """Forget a request that has ended, its last update too: a call may stay open for any number of requests."""
        self.places.pop(request_id, None)
        self._last.pop(request_id, None)

    def examine(self, check: Callable[[], None]) -> None:
        """Run a check of the model and refuse this call alone if it raises, for any reason."""
        fault = raised_twice(check)
        if isinstance(fault, ModelChangedError):
            self.refusal = fault
        elif fault is not None:
            self.refusal = ModelChangedError(
                "the model has changed since it was wrapped, so that it cannot be looked at "
                f"({named_error(fault)}); wrap it again with "
                "SpeculativeModel.from_pretrained(model, …)"
            )
            self.refusal.__cause__ = fault


def request_failed(error: Exception, source: str) -> RequestFailedError:
    """The error of a request that ended because its `source` raised."""
    failed = RequestFailedError(f"a request was ended because {source} raised {named_error(error)}")
    failed.__cause__ = error
    return failed


def taken(request: Request, share: RowRound, now: float) -> Update:
    """A request's update of one round; with an error when its text or the user's code in it raised."""
    undo = partial(request.give_back, len(request.new_tokens), len(request.rounds), request.finish_reason)
    try:
        return request.take(share, now)
    except Exception as error:
        first = error
    found = []

    def again() -> None:
        undo()
        found.append(request.take(share, now))

    try:
        fault = raised_again(first, again)
    finally:
        del first  # its traceback holds this frame
    if isinstance(fault, UserCodeError):
        return Update(request.id, [], "", error=request_failed(fault.error, fault.source))
    if fault is not None:
        return Update(request.id, [], "", error=request_failed(fault, "its text or stop strings"))
    return found[-1]
