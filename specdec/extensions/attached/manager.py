"""Manager: transformers' interface of continuous batching, over one call of this library that stays open.

Source: huggingface/transformers, generation/continuous_batching/continuous_api.py (`ContinuousBatchingManager`).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from attention.errors import named_error
from specdec.engine.streams import Stream
from specdec.errors import InvalidInputError, SpecdecError
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from specdec.requests.submission import from_generation_config
from specdec.values import IdSequence, Json, Options, listed, without, without_none

_FEATURES = ("temperature", "top_k", "top_p")
"""Options that `add_request` takes for one request, as transformers'."""


@dataclass
class _Ongoing:
    """A completion of the manager. output: grows with its tokens, delivered as a copy. parent: its request's id."""

    output: GenerationOutput
    parent: str
    streaming: bool

    @classmethod
    def of(cls, request_id: str, parent: str, prompt: list[int], streaming: bool, timestamps: bool) -> _Ongoing:
        """One that waits. timestamps: whether those of its tokens are noted."""
        times: list[float] | None = [] if timestamps else None
        output = GenerationOutput(request_id, [*prompt], created_time=time.perf_counter(), timestamps=times)
        return cls(output, parent, streaming)

    def copy(self) -> GenerationOutput:
        """The output as it is now."""
        own = self.output
        times = self.output.timestamps
        lists: Json = {"generated_tokens": [*own.generated_tokens], "logprobs": [*own.logprobs]}
        return replace(own, **lists, timestamps=None if times is None else [*times])


class Manager:
    """Requests are added at any time and share one batch; a thread of the manager's runs the rounds.

    As in transformers: `start`, `stop`, `join`, `pause`, `add_request(s)`, `cancel_request`, `get_result`, iteration,
    `request_id_iter`, `register_result_handler`. A streaming request has a result a round, with several tokens.
    A cancelled one ends with the tokens that it has. All options of the generation config are honoured.
    """

    warmed_up = True

    def __init__(self, model: SpeculativeModel, generation_config: GenerationConfig, options: Any = None) -> None:
        """options: a ContinuousBatchingConfig, of which `return_logprobs` is read.

        Raises:
            InvalidInputError: the generation config has an option that this library has not.
        """
        self.model = model
        self.generation_config = generation_config
        self.continuous_batching_config = options
        self.background_thread_status = SimpleNamespace(fatal_error=None)
        # `max_length` counts a prompt that is not there yet: the model's own or 20 new tokens take its place.
        relative = GenerationConfig(**without(generation_config.to_dict(), ("max_length",)))
        params = from_generation_config(relative, model.hf_model, 0)
        self._params = replace(params, strict_length=True)
        if getattr(options, "return_logprobs", False):
            self._params = replace(self._params, logprobs=0, logprobs_mode="processed")
        self.num_return_sequences = self._params.n
        self._numbers = itertools.count()
        self._change = threading.Condition()
        self._new: list[tuple[list[int], SamplingParams, list[_Ongoing]]] = []
        self._results = deque[GenerationOutput]()
        self._handlers: dict[str, tuple[Callable[[GenerationOutput], Any], asyncio.AbstractEventLoop]] = {}
        self._ongoing: dict[int, _Ongoing] = {}
        self._cancelled = set[str]()
        self._pauses = 0
        self._paused = False
        self._stopping = False
        self._hard = False
        self._thread: threading.Thread | None = None
        self._stream: Stream | None = None

    def warmup(self) -> None:
        """Nothing: graphs were captured while loading."""

    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    is_alive = is_running

    def start(self) -> None:
        """Start the thread; nothing where it runs."""
        if not self.is_running():
            self._stopping = self._hard = False
            self.background_thread_status.fatal_error = None
            self._thread = threading.Thread(target=self._run, name="specdec-manager", daemon=True)
            self._thread.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Let the thread finish what was added, or, with hard_stop, end it: such requests fail.

        Raises:
            RuntimeError: inside `pause`.
        """
        with self._change:
            if self._pauses:
                raise RuntimeError("cannot stop the manager from inside a pause; leave the `pause` context first")
            self._stopping = True
            self._hard = hard_stop
            self._change.notify_all()
        if block:
            self.join(time.perf_counter(), timeout)

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait for the thread, at most so many seconds."""
        if self._thread is not None:
            self._thread.join(timeout)

    def destroy(self) -> None:
        """Stop and wait."""
        if self.is_running():
            self.stop()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A block during which no round runs, for example to write new weights in place. Requests go on afterwards.

        Raises:
            RuntimeError: the thread does not run.
        """
        if not self.is_running():
            raise RuntimeError("cannot pause generation while no generation loop is running")
        with self._change:
            self._pauses += 1
            self._change.notify_all()
            while not self._paused and self.is_running():
                self._change.wait(0.1)
        try:
            yield
        finally:
            with self._change:
                self._pauses -= 1
                self._change.notify_all()

    def add_request(
        self,
        input_ids: IdSequence,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
        **options: Any,
    ) -> str:
        """Queue a request; returns its id.

        Raises:
            InvalidInputError: an option or a prompt that cannot be served; nothing is queued. RuntimeError: the manager
                is stopping.
        """
        if self._stopping:
            raise RuntimeError("the manager is stopping and takes no more requests; start() it again")
        name = f"req_{next(self._numbers)}" if request_id is None else request_id
        params = self._of_request(max_new_tokens, eos_token_id, options)
        prompt = list(input_ids)
        self.model.engine.admission.check(prompt, params)
        ids = (name, *(f"{name}__child#{i}" for i in range(params.n - 1)))
        with self._change:
            each = [_Ongoing.of(one, name, prompt, streaming, record_timestamps) for one in ids]
            self._new.append((prompt, params, each))
            self._change.notify_all()
        return name

    def check(self, inputs: Sequence[Sequence[int]], max_new_tokens: int | None = None, **options: Any) -> None:
        """Whether such requests can be served.

        Raises:
            InvalidInputError: an option or a prompt that cannot. ModelChangedError: as `SpeculativeModel.stream`.
        """
        params = self._of_request(max_new_tokens, None, options)
        self.model.stream([list(ids) for ids in inputs], params).close()

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **options: Any,
    ) -> list[str]:
        """`add_request` for each; returns their ids in order. Raises as `check`; nothing is queued then."""
        self.check(inputs, max_new_tokens, **options)
        own = (None, max_new_tokens, streaming, record_timestamps)
        return [self.add_request(ids, *own, **options) for ids in inputs]

    def cancel_request(self, request_id: str) -> None:
        """End a request, its samples too, with the tokens that they have; nothing where there is none of that id."""
        with self._change:
            self._cancelled.add(request_id)
            self._change.notify_all()

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next result, of any request or of this one; None after so many seconds, or when none can come."""
        end = math.inf if timeout is None else time.perf_counter() + timeout
        with self._change:
            while True:
                for place, found in enumerate(self._results):
                    if request_id is None or found.request_id == request_id:
                        del self._results[place]
                        return found
                left = end - time.perf_counter()
                if not self.is_running() or left <= 0:
                    return None
                self._change.wait(min(left, 0.1))

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Results as they come, while the thread runs."""
        return self.request_id_iter(None)

    def request_id_iter(self, request_id: str | None) -> Iterator[GenerationOutput]:
        """Results of one request, up to its end; of None, those of all."""
        while self.is_running() or self._results:
            if (found := self.get_result(request_id, timeout=0.1)) is not None:
                yield found
                if request_id is not None and found.is_finished():
                    return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], Any]) -> None:
        """Have a request's results given to a function, on the running event loop, in place of `get_result`."""
        with self._change:
            self._handlers[request_id] = (callback, asyncio.get_running_loop())

    def _of_request(self, max_new_tokens: int | None, eos: Any, options: Options) -> SamplingParams:
        changed = without_none(options)
        if odd := sorted(without(changed, _FEATURES)):
            raise InvalidInputError(f"add_request({', '.join(odd)}=…): allowed are {', '.join(_FEATURES)}")
        if changed and self._params.greedy:
            raise InvalidInputError(
                f"{', '.join(sorted(changed))}: the manager's generation config has do_sample=False"
            )
        if max_new_tokens is not None:
            changed["max_new_tokens"] = max_new_tokens
        if eos is not None:
            ids = tuple(int(i) for i in listed(eos) if i >= 0)
            changed |= {"ignore_eos": True, "stop_token_ids": ids}
        return replace(self._params, **changed)

    def _run(self) -> None:
        """The thread: queue new requests, run a round, deliver its results."""
        try:
            while self._wait():
                self._queue()
                if self._ongoing and self._stream is not None:
                    self._step(self._stream)
        except BaseException as error:
            self.background_thread_status.fatal_error = error
        finally:
            self._end()

    def _wait(self) -> bool:
        """Wait until there is something to do; False at the end."""
        with self._change:
            while self._pauses or not (self._new or self._ongoing or self._cancelled or self._stopping):
                self._paused = self._pauses > 0
                self._change.notify_all()
                self._change.wait(0.5)
            self._paused = False
            return not self._hard and bool(self._new or self._ongoing or not self._stopping)

    def _queue(self) -> None:
        """What is new joins the call, all of it at once: the model is looked at once for a call."""
        with self._change:
            new = self._new
            self._new = []
            gone = self._cancelled
            self._cancelled = set()
        if new:
            prompts, params, ongoing = zip(*new, strict=True)
            stream = self.model.stream(list(prompts), list(params))
            places = range(stream.num_requests) if self._stream is None else self._stream.take_over(stream)
            self._stream = self._stream or stream
            for place, own in zip(places, itertools.chain(*ongoing), strict=True):
                own.output.lifespan = (time.perf_counter(), -1.0)
                self._ongoing[place] = own
        cancelled = [place for place, own in self._ongoing.items() if own.parent in gone] if gone else []
        if cancelled and self._stream is not None:
            self._stream.cancel(*cancelled)

    def _step(self, stream: Stream) -> None:
        """Deliver one update."""
        found = stream.next_update()
        if found is None:
            raise SpecdecError("requests of this manager are no longer in the engine: its model was used in a fork?")
        place, update = found
        own = self._ongoing[place]
        now = time.perf_counter()
        output = own.output
        output.status = RequestStatus.DECODING
        output.generated_tokens += update.token_ids
        output.logprobs += [each.logprob for each in update.logprobs or ()]
        if output.timestamps is not None:
            output.timestamps += [now] * len(update.token_ids)
        if update.last:
            output.status = RequestStatus.FINISHED
            output.lifespan = (output.lifespan[0], now)
            del self._ongoing[place]
        if update.error is not None:
            output.status = RequestStatus.FAILED
            output.error = str(update.error)
        if own.streaming or update.last:
            with self._change:
                self._tell(own.copy())

    def _fail(self, each: Iterable[_Ongoing], reason: str) -> None:
        """End these requests."""
        for own in each:
            own.output.status = RequestStatus.FAILED
            own.output.error = reason
            self._tell(own.copy())

    def _end(self) -> None:
        error = self.background_thread_status.fatal_error
        with self._change:
            self._fail(self._ongoing.values(), "the manager was stopped" if error is None else named_error(error))
            self._ongoing.clear()
        stream = self._stream
        self._stream = None
        if stream is not None:
            stream.close()
        with self._change:
            self._fail(itertools.chain(*(ongoing for _, _, ongoing in self._new)), "stopped")
            self._new.clear()
            self._paused = True
            self._change.notify_all()

    def _tell(self, output: GenerationOutput) -> None:
        """Give a result to its handler or to `get_result`; the lock is held."""
        handler = self._handlers.get(output.request_id)
        if handler is None:
            self._results.append(output)
        else:
            callback, loop = handler
            loop.call_soon_threadsafe(callback, output)
            if output.is_finished():
                del self._handlers[output.request_id]
        self._change.notify_all()
