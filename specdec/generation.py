"""Prompts in, completions out: what a SpeculativeModel offers once it is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

from transformers import PreTrainedModel

from specdec.config import EngineConfig
from specdec.engine.engine import Engine
from specdec.engine.scheduler import Usage
from specdec.engine.sharing import SharedEngine
from specdec.engine.stats import EngineStats
from specdec.engine.streams import Stream
from specdec.interrupts import interrupts_as_they_are
from specdec.options import Use
from specdec.requests.prompts import Prompts
from specdec.requests.request import Completion
from specdec.requests.submission import Params, check_each, submissions
from specdec.wrapped.model_check import LiveModel


class Generation:
    """Generate and stream over an engine that callers on any thread share. Whoever inherits it makes the attributes.

    Attributes:
        hf_model, tokenizer, generation_config_use, engine, config: see `specdec.model.SpeculativeModel`.
    """

    hf_model: PreTrainedModel
    tokenizer: Any
    generation_config_use: Use
    engine: Engine
    config: EngineConfig
    _shared: SharedEngine
    _live: LiveModel

    @property
    def engine_stats(self) -> EngineStats:
        """Counters since loading: rounds, tokens through the target, transfers, preemptions."""
        return self._shared.stats

    def usage(self) -> Usage:
        """What requests hold at this moment: requests waiting and running, rows, pages of both caches; 0 when idle.

        Waits for the end of a round that another thread runs.

        Raises:
            InvariantError: with SPECDEC_CHECK=1, when a page of a cache has no owner, or two.
            SpecdecError: called from inside a round.
        """
        return self._shared.usage()

    def generate(self, prompts: Prompts, params: Params = None) -> list[Completion]:
        """Generate for one prompt or many, batched continuously.

        Where they are more than `max_num_seqs`, they begin in their order, but for those with so large a
        `max_new_tokens` that they would end after all others: these begin earlier (`specdec.engine.admission`).

        Args:
            prompts: str, token ids, chat messages, or a list of any of these; a tensor or array of ids (1-D: one
                prompt, 2-D: one a row); a BatchEncoding, or a dict of input_ids and attention_mask, padded on either
                side.
            params: SamplingParams or a transformers.GenerationConfig, one for all or one a prompt; default greedy.

        Returns:
            One Completion a prompt, in order (SamplingParams.n, or num_return_sequences of a GenerationConfig: that
            many in a row).

        Raises:
            InvalidInputError: a bad prompt or parameter; nothing was started, the model stays usable.
            ClosedModelError: the model is closed, or was closed on another thread meanwhile.
            ModelChangedError: `hf_model` was moved, recast, resized, rebuilt or put into training mode meanwhile.
            RequestFailedError: a request failed in itself (its tokenizer raised); raised when the others are finished.
            RoundFailedError: a round that requests of this call were in failed twice, on the device for example.
            Exception: what a signal handler (an alarm) or another thread raised in this call, as it is; others go on.
        """
        done = dict(self.generate_iter(prompts, params))
        return [done[i] for i in sorted(done)]

    def generate_iter(self, prompts: Prompts, params: Params = None) -> Iterator[tuple[int, Completion]]:
        """As `generate`, but yield (index, Completion) as each finishes."""
        with closing(self.stream(prompts, params)) as stream:
            for update in stream:
                if update.completion is not None:
                    yield update.index, update.completion

    def stream(self, prompts: Prompts, params: Params = None) -> Stream:
        """As `generate`, but yield every round's new tokens and text as they are accepted.

        Closing the iterator early, on any thread, aborts what is left.

        Raises:
            InvalidInputError, ClosedModelError, ModelChangedError: as `generate`; the others come from the iterator.
        """
        self._shared.check_open()
        check = self._live.begin_check()
        with interrupts_as_they_are():
            requests = submissions(prompts, params, self.hf_model, self.tokenizer, self.generation_config_use)
            check_each(requests, lambda request: self.engine.check(request.token_ids, request.params))
        return Stream(self._shared, requests, check=check)
