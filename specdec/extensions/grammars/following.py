"""RequestGrammar: the state of one request in its grammar, and the tokens allowed at each of its positions.

The state covers committed tokens only; drafts are tried on copies, or rolled back.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attention.errors import named_error
from specdec.errors import InvalidInputError, SpecdecError
from specdec.extensions.grammars.compiled import STUCK, CompiledGrammar, GrammarCompiler, Ids, compiler_of
from specdec.requests.grammar import Grammar, TokenMatcher
from specdec.rounds.extras import TokenContext
from specdec.values import IdSequence, TokenIds


@dataclass
class RowMasks:
    """Masks of the positions of a row, one before each draft and one after the last.

    Positions in neither `chains` nor `ready` follow a draft that is not allowed: it is rejected, so they are not read.

    Attributes:
        drafts: of the row. chains: (matcher, first position, drafts) for `GrammarCompiler.fill`, the matchers copies.
        ready: position -> mask [W] int32, None: any token.
        within: positions at which the grammar decides; after its end only an end id is allowed there.
    """

    drafts: Ids
    within: list[int] = field(default_factory=list)
    chains: list[tuple[Any, int, Ids]] = field(default_factory=list)
    ready: dict[int, np.ndarray | None] = field(default_factory=dict)


class RequestGrammar:
    """The grammar of one request, of any kind. Positions without a possible token are noted: see `error_at`.

    Attributes:
        vocabulary, can_loop: of a compiled grammar. prompt_len, ends: of its request, known once that has a row: tokens
            of the prompt, and ids that end it.
    """

    vocabulary: GrammarCompiler | None = None
    prompt_len = 0
    ends: TokenIds = ()
    can_loop = False

    def __init__(self) -> None:
        self._seen: Ids = []
        self._errors: dict[int, tuple[Ids, Exception]] = {}

    def follow(self, new_ids: IdSequence) -> None:
        """Take all committed tokens after the prompt; restarts if other tokens were taken before.

        Errors noted after drafts that were rejected are forgotten.
        """
        seen = self._seen
        own = list(new_ids)
        kept = self._errors.items()
        self._errors = {at: (ids, e) for at, (ids, e) in kept if len(ids) < len(own) and own[: len(ids)] == ids}
        if own[: len(seen)] != seen:
            self._restart()
            seen.clear()
        for token_id in own[len(seen) :]:
            if not self._take(token_id):
                self.note(self.prompt_len + len(seen), [], SpecdecError(f"token {token_id} cannot come next"))
            seen.append(token_id)

    def masks(self, drafts: Ids, words: int) -> RowMasks:
        """Masks before each draft and after the last. words: W. Does not change the state."""
        raise NotImplementedError

    @property
    def is_over(self) -> bool:
        """Whether only the request's end is allowed next."""
        return False

    def forced(self) -> Ids:
        """Tokens that must come next, as the tokenizer writes them; [] if several tokens are allowed."""
        return []

    def started(self, new_ids: IdSequence) -> bool:
        """Whether it has begun within all new tokens of the request; with a begin marker it may not have."""
        return True

    def dead_end(self, drafts: Ids, masks: np.ndarray) -> tuple[int, str] | None:
        """The first position of a row at which no token is allowed, and why; None without such a position.

        Called if a matcher of the row has failed, or one of the round did not return.

        masks: [n+1, W] of the row, written anew.
        """
        return None

    def note(self, length: int, drafts: Ids, error: Exception) -> None:
        """Note why no token can come after so many tokens, the last ones these drafts."""
        self._errors.setdefault(length, (self._seen + drafts, error))

    def error_at(self, length: int) -> Exception | None:
        """Why no token was allowed at or before the position after so many tokens; None if some were."""
        return next((error for at, (_, error) in sorted(self._errors.items()) if at <= length), None)

    def _restart(self) -> None:
        raise NotImplementedError

    def _take(self, token_id: int) -> bool:
        """Take one more token; False where it may not come."""
        raise NotImplementedError


class FollowedGrammar(RequestGrammar):
    """A compiled grammar."""

    def __init__(self, compiled: CompiledGrammar, ends: Sequence[int] = (), prompt_ids: IdSequence = ()) -> None:
        """ends: ids that end the request. prompt_ids: its prompt, which may end with the begin marker."""
        super().__init__()
        self._all_ends = {compiled.vocabulary.eos, *ends}
        self._compiled = compiled
        self.vocabulary = compiled.vocabulary
        self.can_loop = compiled.can_loop
        self._begins = compiled.begins_after(prompt_ids)
        compiled.add_request()
        self._restart()

    def _restart(self) -> None:
        self._matcher = self._compiled.matcher() if self._begins else None
        self._state = 0

    def started(self, new_ids: IdSequence) -> bool:
        """See `RequestGrammar.started`."""
        state = 0
        begin = self._compiled.begin
        if self._begins or begin is None:
            return True
        for token_id in new_ids:
            state, rest = begin.after(state, token_id)
            if rest is not None:
                return True
        return False

    def _take(self, token_id: int) -> bool:
        matcher = self._matcher
        if self._is_given_up:  # its calls would hold the GIL forever
            return True
        fits = matcher is None or token_id in self._all_ends or bool(matcher.validate_tokens([token_id]))
        self._matcher, self._state = self._after(matcher, self._state, token_id)
        return fits

    def _after(self, matcher: Any, state: int, token_id: int) -> tuple[Any, int]:
        """The matcher, None outside of the grammar, and the state of its begin marker, after one more token."""
        if matcher is None:
            assert self._compiled.begin is not None
            state, rest = self._compiled.begin.after(state, token_id)
            begun = None if rest is None else self._compiled.matcher(rest)
            ended = begun is not None and self._compiled.returns and begun.is_stopped()
            return (None if ended else begun), state
        if not matcher.is_stopped():  # a stopped matcher takes no tokens
            matcher.try_consume_tokens([token_id])
        return (None if self._compiled.returns and matcher.is_stopped() else matcher), 0

    def masks(self, drafts: Ids, words: int) -> RowMasks:
        """See `RequestGrammar.masks`."""
        found = RowMasks(drafts)
        at = 0
        matcher = self._matcher
        state = self._state
        if self._is_given_up:
            raise SpecdecError(f"the grammar cannot go on: {STUCK}")
        while True:
            if matcher is not None:
                taken = self._taken_to_the_end(matcher, drafts[at:]) if self._compiled.returns else None
                chain = drafts[at:] if taken is None else drafts[at : at + taken - 1]
                found.within += range(at, at + len(chain) + 1)
                if not matcher.is_stopped():
                    found.chains.append((matcher.deep_copy(), at, chain))
                if taken is None:
                    return found
                matcher = None
                state = 0
                at += taken
            mask = found.ready[at] = self._compiled.free_mask(state)
            if at == len(drafts) or (mask is not None and not allows(mask, drafts[at])):
                return found
            matcher, state = self._after(None, state, drafts[at])
            at += 1

    @property
    def is_over(self) -> bool:
        """See `RequestGrammar.is_over`."""
        return self._matcher is not None and bool(self._matcher.is_stopped())

    @property
    def _is_given_up(self) -> bool:
        return self._compiled in self._compiled.vocabulary.given_up

    def forced(self) -> Ids:
        """See `RequestGrammar.forced`."""
        if self._matcher is None or self.is_over or self.can_loop:
            return []
        return list(self._matcher.compute_ff_tokens())

    def dead_end(self, drafts: Ids, masks: np.ndarray) -> tuple[int, str] | None:
        """See `RequestGrammar.dead_end`."""
        matcher = self._matcher and self._matcher.deep_copy()
        state = self._state
        for at, draft in enumerate([*drafts, None]):
            if matcher is not None and not matcher.is_stopped():
                one = matcher.deep_copy()
                if not self._compiled.vocabulary.fill([(one, at, [])], masks):
                    self._compiled.vocabulary.given_up.add(self._compiled)
                    masks[:] = -1
                    return 0, STUCK
                if one.is_error():
                    masks[at] = -1
                    return at, str(one.get_error()).partition("\n")[0]
            if draft is None or not allows(masks[at], draft):
                return None
            matcher, state = self._after(matcher, state, draft)
        return None

    @staticmethod
    def _taken_to_the_end(matcher: Any, drafts: Ids) -> int | None:
        """How many drafts it takes up to the grammar's end; None where they do not come to that."""
        matcher = matcher.deep_copy()  # never rolled back: see `GrammarCompiler.fill`
        for taken, draft in enumerate(drafts, 1):
            if not matcher.try_consume_tokens([draft]):
                return None
            if matcher.is_stopped():
                return taken
        return None


class UserGrammar(RequestGrammar):
    """A matcher of the user's, copied for one request."""

    def __init__(self, matcher: TokenMatcher) -> None:
        """Raises InvalidInputError: it cannot be copied."""
        super().__init__()
        try:
            self._own: TokenMatcher = matcher.fork() if hasattr(matcher, "fork") else copy.deepcopy(matcher)
        # The user's fork or __deepcopy__ may raise anything.
        except Exception as error:
            raise InvalidInputError(
                f"grammar: {type(matcher).__name__} cannot be copied for its request ({named_error(error)})"
                "; give it a fork or a __deepcopy__"
            ) from error
        if not isinstance(self._own, TokenMatcher):
            raise InvalidInputError(f"grammar: a fork of {type(matcher).__name__} has no fill, advance and rollback")

    def _restart(self) -> None:
        self._own.rollback(len(self._seen))

    def _take(self, token_id: int) -> bool:
        self._own.advance(token_id)  # the result is unused: it was allowed when it was chosen, or it is an end id
        return True

    def masks(self, drafts: Ids, words: int) -> RowMasks:
        """See `RequestGrammar.masks`."""
        found = RowMasks(drafts)
        taken = 0
        for at in range(len(drafts) + 1):
            mask = found.ready[at] = np.zeros(words, np.int32)
            self._own.fill(mask)
            if at == len(drafts) or not self._own.advance(drafts[at]):
                break
            taken += 1
        self._own.rollback(taken)
        return found


def followed(
    given: Grammar | TokenMatcher | RequestGrammar, context: TokenContext, endless: bool, prompt_ids: IdSequence
) -> RequestGrammar:
    """The grammar of one request, with separate state. endless: the model's own eos ids do not end the request.

    Raises:
        InvalidInputError: it is no grammar, cannot be matched or spelled, or its request could not end with it.
    """
    if isinstance(given, RequestGrammar):
        return given
    if not isinstance(given, Grammar):
        return UserGrammar(given)
    ends = context.ends
    eos = getattr(context.tokenizer, "eos_token_id", None)
    if eos is None and ends:
        eos = ends[0]
    if eos is None or not (ends or endless):
        raise InvalidInputError(
            "a grammar needs an id that ends its request, and neither the model's generation_config nor its tokenizer "
            "has an eos id: give stop_token_ids"
        )
    compiler = compiler_of(context.tokenizer, context.vocab_size, int(eos))
    return FollowedGrammar(compiler.compiled(given), ends, prompt_ids)


def allows(masks: np.ndarray, token_id: int) -> np.ndarray:
    """[...] int32: 1 where masks [..., W] allow a token, else 0."""
    return masks[..., token_id // 32] >> token_id % 32 & 1
