"""RequestProcessors, RequestCriteria: a user's logits processors and stopping criteria, of one request.

Their calls are those of transformers: a processor is called for every position of a verification, with the tokens
before it [1, L] int64 and its scores [1, V] float32, a criterion once for every committed token, in order. Drafts may
be rejected, so a processor with a state is copied before every position, and goes on from the copy that has seen the
tokens which were accepted.

Source: huggingface/transformers, generation/logits_process.py (LogitsProcessorList), generation/stopping_criteria.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from attention.errors import named_error
from attention.toml_tables import read_tables
from specdec.errors import InvalidInputError
from specdec.interrupts import is_from_outside
from specdec.user_warnings import warn_user
from specdec.values import Options, flag, listed, refuse, short

Processor = Callable[[Tensor, Tensor], Tensor]
Criterion = Callable[..., Any]
PrefixFunction = Callable[[int, Tensor], Sequence[int]]

_KEPT_ROUNDS = 4
"""Rounds whose states are kept: after an interrupt a request goes on from its last reported token, at most two rounds
of it having been launched since."""
_KEPT_LEFT = 1024
"""Positions of which is kept what options leave: more than rounds have drafts."""

_TABLES = read_tables("specdec", "requests/processors.toml")
OPTIONS_OF: dict[type, str] = {getattr(hf, name): option for name, option in _TABLES["options"].items()}
"""transformers' processors without a state, by exact class, and the options that make `generate` build one itself."""

STATELESS = frozenset(OPTIONS_OF) | {getattr(hf, name) for name in _TABLES["stateless"]["others"]}
"""transformers' processors that calls do not change, by exact class; each treats every row by that row alone."""
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_RUN_A_MODEL = (hf.UnbatchedClassifierFreeGuidanceLogitsProcessor,)


def processors(name: str, given: Any) -> tuple[Processor, ...] | None:
    """Logits processors from one, a list of them or a LogitsProcessorList; None from an empty one.

    Raises:
        InvalidInputError: something that cannot be called, or a processor that runs a model itself.
    """
    found = _callables(name, given, "a callable (input_ids, scores) -> scores, or a list of them")
    for one in found or ():
        if isinstance(one, _RUN_A_MODEL):
            raise InvalidInputError(f"{name} has a {type(one).__name__}, which runs a model: not served")
    return found


def criteria(name: str, given: Any) -> tuple[Criterion, ...] | None:
    """Stopping criteria from one, a list of them or a StoppingCriteriaList. Raises as `processors`."""
    return _callables(name, given, "a callable (input_ids, scores) -> bool, or a list of them")


def prefix_function(name: str, given: Any) -> PrefixFunction:
    """A `prefix_allowed_tokens_fn`. Raises InvalidInputError: it cannot be called."""
    if not callable(given):
        raise refuse(name, given, "a function (batch_id, input_ids) -> token ids")
    return given


def overlapping(given: Iterable[Processor], settings: Options) -> list[tuple[type, str]]:
    """Processors' classes whose option is set beside them: transformers' `generate` drops its own then."""
    return [(type(one), OPTIONS_OF[type(one)]) for one in given if OPTIONS_OF.get(type(one)) in settings]


def _callables(name: str, given: Any, allowed: str) -> tuple[Any, ...] | None:
    several = listed(given)
    if not all(callable(one) and not isinstance(one, type) for one in several):
        raise refuse(name, given, allowed)
    return tuple(several) or None


@dataclass(frozen=True)
class RowWise:
    """A caller's processor or criterion, declared by `row_wise`."""

    code: Any
    batched: bool = False

    def __call__(self, *given: Any, **named: Any) -> Any:
        """As the code."""
        return self.code(*given, **named)


def row_wise(code: Any, batched: bool = False) -> RowWise:
    """Declare that a logits processor or a stopping criterion treats each row by that row alone.

    An attached model's `generate` shows such code one sequence, [1, L] and [1, V], at a time, copied for each. Other
    code of yours is refused where a call has several sequences: it may take row b of a batch for prompt b.

    >>> banned = row_wise(lambda ids, scores: scores.scatter(1, ids[:, -1:], float("-inf")))
    >>> banned(torch.tensor([[0], [1]]), torch.zeros(2, 2)).tolist()
    [[-inf, 0.0], [0.0, -inf]]

    Args:
        code: a callable, as transformers calls it. What is returned can be passed in its place, attached or not.
        batched: of a processor that keeps nothing from one call to the next: it is called once a round with the
            positions of all requests that were given this object, [N, L] and [N, V], in place of once for each. Shorter
            rows are padded on the left with their own first token.

    Raises:
        InvalidInputError: it cannot be called, or is a list: declare its members.
    """
    if not callable(code) or isinstance(code, list):
        raise InvalidInputError(f"row_wise({short(code)}): give one logits processor or one stopping criterion")
    return RowWise(code, flag("batched", batched))


class UserCodeError(Exception):
    """What code of the user's raised in a request. error: it. source: what raised, in words."""

    def __init__(self, error: Exception, source: str) -> None:
        super().__init__(str(error))
        self.error = error
        self.source = source


@dataclass(frozen=True)
class State:
    """What the processors of a request are after the position of a prefix, or why they ended it there."""

    processors: tuple[Processor, ...]
    error: Exception | None = None


@dataclass(frozen=True)
class _Left:
    """The largest score of a position, by which it is known whether a token could be chosen there.

    Attributes:
        largest: [N] float32 on the CPU, of all positions of a round; complete once the round's result is read.
        row: which is the position's. temperature: of a sampled request; 0 of a greedy one.
    """

    largest: Tensor
    row: int
    temperature: float

    def error(self, length: int) -> Exception | None:
        """Why no token could be chosen after so many tokens; None if one could."""
        top = self.largest[self.row]
        top = top / self.temperature if self.temperature else top
        if bool(top.isfinite() if self.temperature else top > float("-inf")):
            return None
        found = "a score is NaN" if bool(top.isnan()) else f"the largest score is {float(top)}"
        divided = " after it was divided by the temperature" if self.temperature else ""
        return ValueError(f"no token can be chosen after {length} tokens: {found}{divided}")


class RequestProcessors:
    """Logits processors of one request, in their order, with their states after every prefix that may be committed.

    Attributes:
        not_copied: why the processors are called as they are and the request must have no drafts, in words; "" where
            each has no state or was copied for this request.
        together: the user's own objects, if they may be called once for the positions of several requests.
    """

    def __init__(self, given: Sequence[Processor]) -> None:
        """given: the user's own objects, which are not called unless they cannot be copied."""
        self._pure = all(map(_is_pure, given))
        self.together = tuple(given) if all(map(_is_batched, given)) else ()
        self.not_copied = ""
        first = tuple(given)
        if not self._pure:
            try:
                first = copy.deepcopy(first)
            except Exception as error:
                self.not_copied = f"a logits processor cannot be copied ({named_error(error)})"
        self._first = State(first)
        self._after: dict[int, State] = {}
        self._left: dict[int, _Left] = {}
        self._begins: list[int] = []

    def apply(self, ids: Tensor, lens: Sequence[int], scores: Tensor) -> None:
        """Change the scores of one verification of this request in place.

        What a processor raises at a position ends the request only if the tokens before that position are committed:
        see `error_at`. It is not called from there on; what it left of the scores there is for no token.

        Args:
            ids: [n+1, L] int64. lens: of the tokens before each position, each one more than the one before.
            scores: [n+1, V] float32. No inference tensors: the code may keep both.
        """
        state = self._begin(lens[0])
        for row, length in enumerate(lens):
            if state.error is None:
                state = self._next(state, ids[row : row + 1, :length], scores[row : row + 1])
            self._after[length] = state

    def note_largest(self, length: int, largest: Tensor, row: int, temperature: float) -> None:
        """Keep what all options have left of the scores of a position, see `_Left`: the next `error_at` tells."""
        self._left[length] = _Left(largest, row, temperature)
        self._left.pop(length - _KEPT_LEFT, None)

    def error_at(self, length: int) -> Exception | None:
        """What was raised at, or before, the position after so many tokens; None if nothing was."""
        state = self._after.get(length)
        left = self._left.get(length)
        if state is not None and state.error is not None:
            return state.error
        return None if left is None else left.error(length)

    def _begin(self, length: int) -> State:
        """The state after the tokens before the last one; forgets what only rounds before the last few need."""
        self._begins = [*(begin for begin in self._begins if begin < length), length][-_KEPT_ROUNDS:]
        if not self._after or self.together:  # called for several requests at once, it has no states of earlier rounds
            self._after.setdefault(length - 1, self._first)
        oldest = self._begins[0] - 1
        self._after = {at: state for at, state in self._after.items() if oldest <= at < length}
        self._left = {at: left for at, left in self._left.items() if oldest <= at < length}
        return self._after[length - 1]

    def _next(self, state: State, ids: Tensor, scores: Tensor) -> State:
        """Call every processor once more, on copies, and write its scores."""
        try:
            own = state.processors if self._pure or self.not_copied else copy.deepcopy(state.processors)
        except Exception as error:
            if is_from_outside(error):
                raise
            return State((), TypeError(f"it can no longer be copied ({error}): give it a __deepcopy__"))
        try:
            found = _called(own, ids, scores)
            if found is not scores:
                scores.copy_(found)
        except BaseException as error:
            return State((), named(error))
        return State(own)


def call_together(given: Sequence[Processor], ids: Tensor, scores: Tensor) -> bool:
    """Change scores [N, V] of several requests in place by one call of each processor, with tokens ids [N, L].

    Returns:
        False, and nothing is changed, where one raised: whose row it was, calls for each request tell.
    """
    try:
        with torch.inference_mode(False), torch.no_grad():
            own = scores.clone()
            own.copy_(_called(given, ids.clone(), own))
    except BaseException as error:
        named(error)  # raises what came from outside
        return False
    scores.copy_(own)
    return True


class RequestCriteria:
    """Stopping criteria of one request, called once for each of its tokens, in order."""

    def __init__(self, given: Sequence[Criterion], device: torch.device) -> None:
        """device: of the tensors that they get. They are copied for this request, or called as they are where that is
        impossible."""
        try:
            self._own = copy.deepcopy(tuple(given))
        except Exception as error:  # it has a lock, or a file
            if is_from_outside(error):
                raise
            self._own = tuple(given)
            warn_user(f"a stopping criterion cannot be copied for each request ({error}): requests share it")
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._known = 0
        self._end = -1
        self._error: UserCodeError | None = None

    def first_end(self, token_ids: np.ndarray, known: int) -> int | None:
        """How many tokens there are when a criterion is first met, of those after the first `known`; else None.

        Tokens that are generated again after an interrupt are not shown again: they are the same.

        token_ids: [L] int32, the prompt's and all new ones. What criteria launch on a GPU does not wait for rounds.

        Raises:
            UserCodeError: a criterion raised; the same whenever it is asked again.
        """
        if self._error is not None:
            raise self._error
        try:
            with self._beside_rounds(), torch.inference_mode(False), torch.no_grad():
                ids = torch.from_numpy(token_ids).long()[None].to(self._device)
                for length in range(max(known, self._known) + 1, len(token_ids) + 1):
                    met = [bool(torch.as_tensor(one(ids[:, :length], None)).any()) for one in self._own]
                    self._known = length
                    if any(met):
                        self._end = length
                        break
        except BaseException as error:
            self._error = UserCodeError(named(error), "a stopping criterion")
            raise self._error from error
        return self._end if known < self._end <= len(token_ids) else None

    def _beside_rounds(self) -> Any:
        if self._device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return torch.cuda.stream(self._stream)


@dataclass(frozen=True, eq=False)
class Constrained:
    """The processor of a `prefix_allowed_tokens_fn`, for the request at this place of its call."""

    function: PrefixFunction
    batch_id: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        allowed = self.function(self.batch_id, input_ids[0])
        if not len(allowed):
            raise ValueError(f"it allows no token for batch_id {self.batch_id} after {input_ids.shape[1]} tokens")
        kept = torch.full_like(scores, float("-inf"))
        kept[:, allowed] = scores[:, allowed]
        return kept


def named(error: BaseException) -> Exception:
    """What code of the user's raised, as an exception that ends its request; raised as it is if it came from outside.

    One that is no Exception (asyncio.CancelledError, say) is named in a RuntimeError.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit)) or is_from_outside(error):
        raise error
    return error if isinstance(error, Exception) else RuntimeError(named_error(error))


def _is_pure(processor: Any) -> bool:
    """Whether calls change nothing in it: transformers' own classes without a state, and functions."""
    if isinstance(processor, partial):
        return all(map(_is_pure, (processor.func, *processor.args, *processor.keywords.values())))
    if isinstance(processor, Constrained):
        return _is_pure(processor.function)
    if isinstance(processor, RowWise):
        return processor.batched or _is_pure(processor.code)
    return type(processor) in STATELESS or isinstance(processor, (*_FUNCTIONS, int, str, float, NoneType))


def _is_batched(processor: Any) -> bool:
    return isinstance(processor, RowWise) and processor.batched


def _called(given: Sequence[Processor], ids: Tensor, scores: Tensor) -> Tensor:
    for processor in given:
        scores = _checked(processor, processor(ids, scores), scores)
    return scores


def _checked(processor: Processor, found: Any, scores: Tensor) -> Tensor:
    if not isinstance(found, Tensor) or found.shape != scores.shape or not found.is_floating_point():
        given = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(f"{type(processor).__name__} returned {given} in place of scores {tuple(scores.shape)}")
    return found
