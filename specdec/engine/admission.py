"""Admission: checks of a request before it is queued, the order of a call's requests, and the queue."""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from attention.cache.windowed import WindowedTables
from specdec.config import EngineConfig
from specdec.errors import CacheTooSmallError, InvalidInputError, QueueFullError
from specdec.requests.logprobs import MOST_ROW_BYTES
from specdec.requests.prompts import check_num_tokens
from specdec.requests.request import Request, Times
from specdec.requests.sampling import SamplingParams
from specdec.requests.text import TextStream, Tokenizer, Vocabulary
from specdec.rounds.extras import NEEDS_AN_EXTRA, TokenContext
from specdec.rounds.randomness import request_key
from specdec.values import IdSequence
from specdec.wrapped.target import Target


class Admission:
    """Checks requests against the engine's sizes, and makes them.

    Attributes:
        config: the engine's configuration. vocabulary: decodes the texts of requests.
    """

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        config: EngineConfig,
        eos_token_ids: IdSequence,
        capacity_tokens: int,
        windowed: Sequence[WindowedTables] = (),
    ) -> None:
        """eos_token_ids: default of requests that name none.

        capacity_tokens: cache places of the target, in its first group; windowed: its further groups.
        """
        self._target = target
        self.config = config
        self.vocabulary = Vocabulary(tokenizer)
        self._eos = tuple(eos_token_ids)
        self._capacity = capacity_tokens
        self._windowed = tuple(windowed)

    def check(self, token_ids: IdSequence, params: SamplingParams, prompt_alone: bool = False) -> int:
        """Check that a request can be served.

        prompt_alone: the request leaves this engine with its first token, so the cache must hold only its prompt.

        Returns:
            The most tokens that the request may have, prompt and new ones together.

        Raises:
            InvalidInputError: empty or too long prompt, an id outside the vocabulary or an image placeholder, K larger
                than the engine's, with strict_length too many new tokens.
            CacheTooSmallError: the KV cache could not hold the request even alone.
        """
        self.check_prompt(token_ids)
        self.check_ids("stop_token_ids: ", params.stop_token_ids)
        self.check_ids("options: ", sorted(params.token_ids))
        asked = params.num_speculative_tokens
        most = self.config.num_speculative_tokens
        if asked is not None and asked > most:
            raise InvalidInputError(
                f"num_speculative_tokens={asked}: this model was loaded for at most {most}; to raise that, give "
                "num_speculative_tokens when you load it"
            )
        count = len(token_ids)
        limit = min(count + params.max_new_tokens, self.config.max_model_len)
        if params.strict_length and limit < count + params.max_new_tokens:
            raise InvalidInputError(
                f"max_new_tokens={params.max_new_tokens} after a prompt of {count} tokens: with max_model_len="
                f"{self.config.max_model_len} there is room for {limit - count}; lower max_new_tokens, "
                "load with a larger max_model_len, or leave strict_length out: then the request ends there"
            )
        self._check_rows(params, limit - count)
        self._prepared(params, self._eos, ())
        self.check_cache(count, count if prompt_alone else limit)
        return limit

    def check_room(self, present: int, new: int) -> None:
        """Check that `new` requests may join the `present` ones. Raises QueueFullError; InvalidInputError if they would
        not fit even into an idle engine."""
        rows = self.config.max_num_seqs
        waiting = self.config.max_waiting_requests
        if waiting is None:
            return
        most = f"at most {rows} run at once (max_num_seqs) and {waiting} wait (max_waiting_requests)"
        if new > rows + waiting:
            raise InvalidInputError(
                f"one call brings {new} requests (prompts times n): {most}, so it can never be taken; ask for at most "
                f"{rows + waiting} in a call"
            )
        if present + new > rows + waiting:
            raise QueueFullError(f"{new} new requests beside {present} that wait or run: {most}; ask again later")

    def request(
        self,
        request_id: int,
        token_ids: IdSequence,
        params: SamplingParams,
        limit: int,
        sample_index: int,
        eos_token_ids: IdSequence | None,
    ) -> Request:
        """A waiting request. limit: the result of `check`; for the others see `Engine.submit`."""
        config = self.config
        seed, index = (config.seed, request_id) if params.seed is None else (params.seed, sample_index)
        eos = self._eos if eos_token_ids is None else tuple(eos_token_ids)
        params = self._prepared(params.of_request(0, self._target.hf_model.device), eos, token_ids)
        asked = 0 if params.not_drafted else params.num_speculative_tokens
        return Request(
            id=request_id,
            params=params,
            prompt_len=len(token_ids),
            limit=limit,
            num_drafts=config.num_speculative_tokens if asked is None else asked,
            key=request_key(seed, index),
            committed=np.asarray(token_ids, np.int64).astype(np.int32),
            stream=TextStream(self.vocabulary, params.stop),
            sample_index=sample_index,
            eos_token_ids=() if params.ignore_eos else eos,
            times=Times(time.perf_counter()),
        )

    def _prepared(self, params: SamplingParams, eos_token_ids: IdSequence, token_ids: IdSequence) -> SamplingParams:
        """The parameters as the extras need them. Raises InvalidInputError: an extra refuses them, or is missing."""
        extras = self.config.extras
        for option in NEEDS_AN_EXTRA:
            if getattr(params, option) is not None and not any(extra.serves == option for extra in extras):
                raise InvalidInputError(f"{option}: what serves this option is missing from specdec/extensions here")
        ends = (*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids)
        context = TokenContext(self.vocabulary.tokenizer, self._target.vocab_size, ends)
        for extra in extras:
            params = extra.prepared(params, context, token_ids)
        return params

    def _check_rows(self, params: SamplingParams, new_tokens: int) -> None:
        """Raises InvalidInputError: the requested logits and scores are too large."""
        asked = [name for name in ("return_logits", "return_scores") if getattr(params, name)]
        size = 4 * self._target.vocab_size * new_tokens * len(asked)
        if size > MOST_ROW_BYTES:
            raise InvalidInputError(
                f"{' and '.join(asked)} of {new_tokens} new tokens take {size / 2**30:.1f} GiB on the host; at most "
                f"{MOST_ROW_BYTES / 2**30:.0f} GiB a request: lower max_new_tokens, or ask for logprobs"
            )

    def check_prompt(self, prompt: IdSequence) -> None:
        """Raises InvalidInputError: no tokens, too many, or ids that are no text."""
        if not len(prompt):
            raise InvalidInputError("the prompt is empty; at least one token is needed")
        check_num_tokens(len(prompt), self.config.max_model_len)
        # Prompts alone are checked: a placeholder id that the model generates is read back as ordinary text.
        marks = self._target.placeholders
        found = next((t for t in prompt if t in marks), None) if marks else None
        if found is not None:
            raise InvalidInputError(
                f"the prompt has token id {found}, which stands for an image, a video or sound ({marks[found]} of the "
                f"model's configuration), at place {list(prompt).index(found)}; only text is served: leave it out, or "
                "use the model's own generate (model.hf_model)"
            )
        self.check_ids("", prompt)

    def check_ids(self, where: str, token_ids: IdSequence) -> None:
        """Raises InvalidInputError: an id outside the vocabulary. where: what the message begins with."""
        largest = self._target.num_embeddings - 1
        bad = [t for t in token_ids if not 0 <= t <= largest][:1]
        if bad:
            raise InvalidInputError(
                f"{where}token id {bad[0]} is outside the vocabulary 0 … {largest}; if a tokenizer made it, it does "
                "not belong to this model (tokens added without model.resize_token_embeddings?)"
            )

    def check_cache(self, prompt_len: int, limit: int) -> None:
        """Raises CacheTooSmallError: the KV cache could not hold `limit` tokens, new ones included, of one request."""
        if limit > self._capacity:
            raise CacheTooSmallError(
                f"{prompt_len} prompt tokens and {limit - prompt_len} new ones need {limit} cache places; the KV cache "
                f"has {self._capacity}; lower max_new_tokens or load the model with a larger kv_cache_tokens"
            )
        chunk = self.config.max_num_batched_tokens
        for pages in self._windowed:
            needed = pages.most_pages(limit, chunk)
            most = pages.allocator.num_pages - 1
            if needed > most:
                raise CacheTooSmallError(
                    f"{limit} tokens, read up to {chunk} at a time, need {needed} pages of {pages.page_size} tokens in "
                    f"the layers with {pages.reach}; the KV cache has {most}; load the model with a larger "
                    "kv_cache_tokens or a smaller max_num_batched_tokens"
                )


def admission_order(lengths: Sequence[int], rows: int) -> list[int]:
    """First come, first served, but a request that would otherwise end last goes first in time.

    A batch that runs out of requests ends with a few long ones, whose rounds read all weights for hardly any token. So
    before each choice, compute when the rows would finish everything if they shared the work evenly. If the longest
    remaining request would end no earlier than that, it is next; otherwise the request that came first is. Requests of
    equal lengths keep their order. This is an estimate: rows do not share work evenly, and requests may end early.

    Args:
        lengths: the most new tokens of each request. rows: how many run at once.

    Returns:
        Indices of the requests.

    Source: a queue until zero laxity, as S. Cho, S.-K. Lee, A. Han and K.-J. Lin have earliest deadlines until zero
        laxity ("Efficient Real-Time Scheduling Algorithms for Multiprocessor Systems", IEICE Transactions on
        Communications, 2002). The common deadline is a lower bound, R. McNaughton's of tasks that can be interrupted
        ("Scheduling with Deadlines and Loss Functions", Management Science, 1959).

    >>> admission_order([1, 1, 1, 1, 4], 2)  # two rows: the last one would begin at 2 and end at 6, where 4 is enough
    [4, 0, 1, 2, 3]
    >>> admission_order([1, 1, 6, 9], 3)  # no row is through before 9, whoever begins when
    [3, 0, 1, 2]
    """
    came = range(len(lengths))
    if len(lengths) <= rows or min(lengths) == max(lengths):
        return list(came)
    end = max(sum(lengths) / rows, max(lengths))
    by_length = iter(sorted(came, key=lambda i: -lengths[i]))
    in_turn = iter(came)
    longest = next(by_length)
    ends = [0.0] * rows
    taken = set()
    order = list[int]()
    while len(order) < len(lengths):
        while longest in taken:
            longest = next(by_length)
        late = ends[0] + lengths[longest] >= end
        chosen = longest if late else next(i for i in in_turn if i not in taken)
        heapq.heapreplace(ends, ends[0] + lengths[chosen])
        taken.add(chosen)
        order.append(chosen)
    return order


class WaitingRequests(OrderedDict[Request, None]):
    """A queue in which every operation takes as long however many requests wait.

    With methods of `collections.deque`, but a request is found by its identity, in a dict: `del` removes it.
    """

    @property
    def first(self) -> Request:
        """The next request. Raises StopIteration when the queue is empty."""
        return next(iter(self))

    def append(self, request: Request) -> None:
        """It comes behind all others."""
        self[request] = None

    def appendleft(self, request: Request) -> None:
        """It comes before all others."""
        self[request] = None
        self.move_to_end(request, last=False)

    def extend(self, requests: Iterable[Request]) -> None:
        """They come behind all others, in this order."""
        self.update(dict.fromkeys(requests))

    def popleft(self) -> Request:
        """Remove and return the next request. Raises KeyError when the queue is empty."""
        return self.popitem(last=False)[0]
