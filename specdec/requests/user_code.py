"""RequestProcessors, RequestCriteria: a user's logits processors and stopping criteria, of one request.

Their calls are those of transformers: a processor is called for every position of a verification, with the tokens
before it [1, L] int64 and its scores [1, V] float32, a criterion once for every committed token, in order. Drafts may
be rejected, so a processor with a state is copied before every position, and goes on from the copy that has seen the
tokens which were accepted.

Source: huggingface/transformers, generation/logits_process.py (LogitsProcessorList), generation/stopping_criteria.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from transformers.generation import logits_process as hf

from specdec.errors import InvalidInputError
from specdec.interrupts import raised_twice
from specdec.values import short

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Criterion = Callable[..., Any]

_KEPT_ROUNDS = 4
"""Rounds whose states are kept: after an interrupt a request goes on from its last reported token, at most two rounds
of it having been launched since."""

OPTIONS_OF: dict[type, str] = {
    hf.EncoderNoRepeatNGramLogitsProcessor: "encoder_no_repeat_ngram_size",
    hf.EncoderRepetitionPenaltyLogitsProcessor: "encoder_repetition_penalty",
    hf.ExponentialDecayLengthPenalty: "exponential_decay_length_penalty",
    hf.ForcedBOSTokenLogitsProcessor: "forced_bos_token_id",
    hf.ForcedEOSTokenLogitsProcessor: "forced_eos_token_id",
    hf.InfNanRemoveLogitsProcessor: "remove_invalid_values",
    hf.MinLengthLogitsProcessor: "min_length",
    hf.MinNewTokensLengthLogitsProcessor: "min_new_tokens",
    hf.NoBadWordsLogitsProcessor: "bad_words_ids",
    hf.NoRepeatNGramLogitsProcessor: "no_repeat_ngram_size",
    hf.RepetitionPenaltyLogitsProcessor: "repetition_penalty",
    hf.SequenceBiasLogitsProcessor: "sequence_bias",
    hf.SuppressTokensAtBeginLogitsProcessor: "begin_suppress_tokens",
    hf.SuppressTokensLogitsProcessor: "suppress_tokens",
}
"""transformers' processors without a state, by exact class, and the options that make `generate` build one itself."""

_PURE: frozenset[type] = frozenset(OPTIONS_OF) | {
    *(hf.EpsilonLogitsWarper, hf.EtaLogitsWarper, hf.LogitNormalization, hf.MinPLogitsWarper),
    *(hf.PrefixConstrainedLogitsProcessor, hf.TemperatureLogitsWarper, hf.TopHLogitsWarper, hf.TopKLogitsWarper),
    *(hf.TopPLogitsWarper, hf.TypicalLogitsWarper, hf.WatermarkLogitsProcessor),
}
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_RUN_A_MODEL = (hf.UnbatchedClassifierFreeGuidanceLogitsProcessor,)


def processors(name: str, given: Any) -> tuple[Processor, ...]:
    """Logits processors from one, a list of them or a LogitsProcessorList.

    Raises:
        InvalidInputError: something that cannot be called, or a processor that runs a model itself.
    """
    found = _callables(name, given, "a callable (input_ids, scores) -> scores, or a list of them")
    for one in found:
        if isinstance(one, _RUN_A_MODEL):
            raise InvalidInputError(f"{name} has a {type(one).__name__}, which runs a model: not served")
    return found


def criteria(name: str, given: Any) -> tuple[Criterion, ...]:
    """Stopping criteria from one, a list of them or a StoppingCriteriaList. Raises as `processors`."""
    return _callables(name, given, "a callable (input_ids, scores) -> bool, or a list of them")


def prefix_function(name: str, given: Any) -> Callable[[int, torch.Tensor], Sequence[int]]:
    """A `prefix_allowed_tokens_fn`. Raises InvalidInputError: it cannot be called."""
    if not callable(given):
        raise InvalidInputError(f"{name}={short(given)}: allowed is a function (batch_id, input_ids) -> token ids")
    function: Callable[[int, torch.Tensor], Sequence[int]] = given
    return function


def overlapping(given: Iterable[Processor], settings: Mapping[str, Any]) -> list[tuple[type, str]]:
    """Processors' classes whose option is set beside them: transformers' `generate` drops its own then."""
    return [(type(one), OPTIONS_OF[type(one)]) for one in given if OPTIONS_OF.get(type(one)) in settings]


def _callables(name: str, given: Any, allowed: str) -> tuple[Any, ...]:
    several = given if isinstance(given, (list, tuple)) else (given,)
    if not several or not all(callable(one) and not isinstance(one, type) for one in several):
        raise InvalidInputError(f"{name}={short(given)}: allowed is {allowed}")
    return tuple(several)


@dataclass(frozen=True)
class State:
    """What the processors of a request are after the position of a prefix, or why they ended it there."""

    processors: tuple[Processor, ...]
    error: Exception | None = None


class RequestProcessors:
    """Logits processors of one request, in their order, with their states after every prefix that may be committed.

    Attributes:
        not_copied: why the processors are called as they are and the request must have no drafts, in words; "" where
            each has no state or was copied for this request.
    """

    def __init__(self, given: Sequence[Processor]) -> None:
        """given: the user's own objects, which are not called unless they cannot be copied."""
        self._pure = all(map(_is_pure, given))
        self.not_copied, first = "", tuple(given)
        if not self._pure:
            try:
                first = copy.deepcopy(first)
            except Exception as error:
                self.not_copied = f"a logits processor cannot be copied ({type(error).__name__}: {error})"
        self._first = State(first)
        self._after: dict[int, State] = {}
        self._begins: list[int] = []

    def apply(self, ids: torch.Tensor, lens: Sequence[int], scores: torch.Tensor) -> None:
        """Change the scores of one verification of this request in place.

        What a processor raises at a position ends the request only if the tokens before that position are committed:
        see `error_at`. Scores from there on stay as they are.

        Args:
            ids: [n+1, L] int64. lens: of the tokens before each position, each one more than the one before.
            scores: [n+1, V] float32.
        """
        state = self._begin(lens[0])
        for row, length in enumerate(lens):
            if state.error is None:
                state = self._next(state, ids[row : row + 1, :length], scores[row : row + 1])
            self._after[length] = state

    def error_at(self, length: int) -> Exception | None:
        """What was raised at, or before, the position after so many tokens; None if nothing was."""
        state = self._after.get(length)
        return None if state is None else state.error

    def _begin(self, length: int) -> State:
        """The state after the tokens before the last one; forgets what only rounds before the last few need."""
        self._begins = [*(begin for begin in self._begins if begin < length), length][-_KEPT_ROUNDS:]
        if not self._after:
            self._after[length - 1] = self._first
        oldest = self._begins[0] - 1
        self._after = {at: state for at, state in self._after.items() if oldest <= at < length}
        return self._after[length - 1]

    def _next(self, state: State, ids: torch.Tensor, scores: torch.Tensor) -> State:
        """Call every processor once more, on copies, and write its scores."""
        made: list[tuple[tuple[Processor, ...], torch.Tensor]] = []

        def call() -> None:
            own = state.processors if self._pure or self.not_copied else copy.deepcopy(state.processors)
            changed = scores.clone()
            for processor in own:
                changed = _checked(processor, processor(ids, changed), scores)
            made.append((own, changed))

        error = raised_twice(call)
        if error is not None:
            return State((), error)
        own, changed = made[-1]
        scores.copy_(changed)
        return State(own)


class RequestCriteria:
    """Stopping criteria of one request, called in the order of its tokens."""

    def __init__(self, given: Sequence[Criterion], device: torch.device) -> None:
        """device: of the tensors that they get. They are copied for this request, or called as they are where
        that is impossible."""
        try:
            self._own = copy.deepcopy(tuple(given))
        except Exception:  # it has a lock, or a file
            self._own = tuple(given)
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def first_end(self, token_ids: Sequence[int], known: int) -> int | None:
        """How many tokens there are when a criterion is first met, of those after the first `known`; else None.

        token_ids: the prompt's and all new ones. What criteria launch on a GPU does not wait for rounds.
        """
        with self._beside_rounds():
            ids = torch.tensor([token_ids], dtype=torch.int64).to(self._device)
            for length in range(known + 1, len(token_ids) + 1):
                met = [bool(torch.as_tensor(one(ids[:, :length], None)).any()) for one in self._own]
                if any(met):
                    return length
        return None

    def _beside_rounds(self) -> Any:
        if self._device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._stream)


def constrained(function: Callable[[int, torch.Tensor], Sequence[int]], batch_id: int) -> Processor:
    """The processor of a `prefix_allowed_tokens_fn`, for the request at this place of its call."""
    return hf.PrefixConstrainedLogitsProcessor(partial(_at_place, function, batch_id), 1)


def _at_place(function: Callable[[int, torch.Tensor], Sequence[int]], batch_id: int, _: int, ids: torch.Tensor) -> Any:
    return function(batch_id, ids)


def _is_pure(processor: Processor) -> bool:
    """Whether calls change nothing in it: transformers' own classes without a state, and functions."""
    if isinstance(processor, partial):
        return _is_pure(processor.func)
    return type(processor) in _PURE or isinstance(processor, _FUNCTIONS)


def _checked(processor: Processor, found: Any, scores: torch.Tensor) -> torch.Tensor:
    if not isinstance(found, torch.Tensor) or found.shape != scores.shape:
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise TypeError(f"{type(processor).__name__} returned {shape} in place of scores {tuple(scores.shape)}")
    return found
