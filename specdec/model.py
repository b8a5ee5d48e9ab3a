"""SpeculativeModel: a Hugging Face causal language model that generates faster with exactly its own output."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from attention.backends.base import AttentionBackend
from attention.cache.kv_cache import CacheGroup, KVFormat
from attention.runner import GroupRunner
from drafters.base import Head
from drafters.mtp.spec import Concat, Feedback, MtpReading
from specdec.acceptance.packed import unpack_outcome
from specdec.config import EngineConfig
from specdec.engine.engine import Engine, EngineStats, ReadOutcome
from specdec.errors import InvalidInputError, SpecdecError
from specdec.execution.base import Drafter, Executor
from specdec.execution.eager import EagerExecutor
from specdec.loading.backends import check_graphs, kv_format, make_backend
from specdec.loading.facts import facts_of
from specdec.loading.memory import memory_named
from specdec.loading.progress import log, startup_progress
from specdec.loading.sizes import cache_token_bytes, cache_tokens, num_drafts
from specdec.loading.sizes import max_model_len as max_model_len_of
from specdec.loading.targets import load_head, open_target, open_tokenizer
from specdec.requests.generation_config import eos_ids, from_generation_config
from specdec.requests.prompts import Prompts, encode_prompts
from specdec.requests.request import Completion, Update
from specdec.requests.sampling import SamplingParams
from specdec.rounds.buckets import loop_limits
from specdec.target.selftest import self_test, self_test_head
from specdec.target.target import Target, TargetProbe, probe_target

MODEL_FORMAT = KVFormat()
Params = SamplingParams | GenerationConfig | Sequence[SamplingParams] | None


@dataclass(frozen=True)
class StreamUpdate:
    """What one round brought for one prompt: its index, new token ids, new text, and at the end the completion."""

    index: int
    token_ids: list[int]
    text: str
    completion: Completion | None


class SpeculativeModel:
    """The public face: load, generate, stream.

    Attributes:
        hf_model: the unmodified transformers model; its own `generate` works as before.
        tokenizer: its tokenizer.
        head: the draft head, or None.
        config: sizes and limits of the engine.
        backend_name: the attention backend in use.
        self_test_error: relative logit error of the load-time self-test.
        runners: attention of the target and, with a head, of the head.
    """

    def __init__(
        self,
        probed: TargetProbe,
        tokenizer: Any,
        head: Head | None,
        backend: AttentionBackend,
        config: EngineConfig,
        cuda_graphs: bool = False,
        read: ReadOutcome = unpack_outcome,
        format: KVFormat = MODEL_FORMAT,
    ) -> None:
        """Build the engine and run the self-test; prefer `from_pretrained`.

        Args:
            cuda_graphs: compile target and head and run verifications and draft loops from CUDA graphs.
            read: the round's device-to-host read; see `Engine`.
            format: how the target's keys and values are stored.

        Raises:
            InvalidInputError: the backend or the head cannot do with CUDA graphs, or not without.
            UnsupportedModelError: the target would come out wrong.
            UnsupportedAttentionError: the backend lacks a variant.
        """
        loop = None if head is None else head.draft_loop(loop_limits(config))
        check_graphs(backend, loop, cuda_graphs)
        self.hf_model: PreTrainedModel = probed.model
        self.tokenizer = tokenizer
        self.head = head
        self.config = config
        self.backend_name = backend.name
        taps = () if head is None else tuple(head.taps)
        dtype, device = probed.model.dtype, probed.model.device
        attention_specs = tuple(c.attention_spec for c in probed.calls)
        group = CacheGroup("target", attention_specs, config.num_pages, config.page_size, format=format)
        runner = GroupRunner(backend, group, dtype, device)
        self.target = Target(probed, runner, taps, config.max_num_batched_tokens)
        log.info("self-test")
        self.self_test_error = self_test(self.target)
        drafter = None
        if head is not None and loop is not None:
            group = CacheGroup("head", tuple(head.attention_specs), config.num_head_pages, config.page_size)
            drafter = Drafter(head, loop, GroupRunner(backend, group, dtype, device))
        self.runners = (runner,) if drafter is None else (runner, drafter.runner)
        eos = eos_ids(probed.model.generation_config)
        self.executor = _executor(self.target, drafter, config, cuda_graphs)
        self._engine = Engine(self.target, drafter, tokenizer, config, eos, self.executor, read)
        self._inboxes: dict[int, deque[Update]] = {}

    @classmethod
    @startup_progress()
    def from_pretrained(
        cls,
        target: str | Path | PreTrainedModel,
        draft: str | Path | Head | None = None,
        *,
        num_speculative_tokens: int | None = None,
        backend: str = "auto",
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        tokenizer: Any = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 2048,
        page_size: int = 16,
        kv_cache_tokens: int | None = None,
        kv_cache_dtype: str = "auto",
        kv_cache_scales: Sequence[tuple[float, float]] | None = None,
        gpu_memory_utilization: float = 0.9,
        cuda_graphs: bool = False,
        mtp_concat: Concat = "auto",
        mtp_feedback: Feedback = "post_norm",
        seed: int = 0,
    ) -> SpeculativeModel:
        """Load a target, and a draft head that fits it.

        Args:
            target: built-in name, folder, hub name, or a loaded transformers model.
            draft: folder or hub name of a head, "auto" for a built-in target's own, "mtp" for the multi-token-
                prediction module in the target's checkpoint, a loaded head, or None.
            num_speculative_tokens: K, drafts a round; default 5 with a head, 0 without.
            backend: "auto", "torch", "flashinfer", or "batch_invariant": kernels by which a token's result has the same
                bits whatever else is in the batch, so that half precision says the same with and without speculation.
                Needs cuda_graphs=True; slower, see the README.
            dtype: "auto" (float32 on CPU, the checkpoint's on a GPU) or a torch dtype or its name.
            device: default CUDA where there is one; a loaded model stays as it is.
            tokenizer: default the target's own; needed when `target` is a model without a name.
            max_model_len: most tokens of one request; default the model's limit, or where its rotary embedding begins
                to depend on the longest request of the batch (longrope, dynamic).
            max_num_seqs: most requests in one batch.
            max_num_batched_tokens: most tokens of one forward; longer prompts are read in chunks.
            page_size: tokens a page of the KV cache.
            kv_cache_tokens: size of the KV cache; default max_num_seqs full-length requests, at most what
                gpu_memory_utilization leaves on a GPU and 1 GiB on CPU.
            kv_cache_dtype: "auto" (the model's) or "fp8": the target's cache in 8 bits (e4m3), half the memory. That
                changes what the model says a little; with and without speculation it still says the same.
            kv_cache_scales: with "fp8", (scale of keys, scale of values) of each layer: x / scale is stored. Default
                1.0 everywhere, which cuts off values beyond ±448.
            gpu_memory_utilization: share of the GPU's memory that model, cache and graphs may take together.
            cuda_graphs: compile the model and decode from CUDA graphs (on a GPU): many times faster for small batches,
                after a start of one to two minutes. In half precision, rounds of different sizes then run through
                different kernels, and more answers differ from those without drafts, but with "batch_invariant".
            mtp_concat: what a multi-token-prediction module's projection reads first, "embedding_first" or
                "hidden_first"; "auto" is its family's order.
            mtp_feedback: what such a module's next step gets, "post_norm" or "pre_norm". A plainly wrong choice of
                these two is noticed and refused.
            seed: randomness of requests without a seed of their own.

        Raises:
            ModelLoadError, UnsupportedModelError: the target; HeadLoadError, HeadMismatchError: the head;
            InvalidInputError: an option outside what is allowed; CacheTooSmallError, OutOfDeviceMemoryError: memory.
        """
        stored = kv_format(kv_cache_dtype, kv_cache_scales)
        log.info("loading the target")
        model, name = open_target(target, dtype, device)
        tokenizer = open_tokenizer(tokenizer, name)
        backend_ = make_backend(backend, model.device)
        probed = probe_target(model)
        log.info("loading the head")
        head = None if draft is None else load_head(draft, name, probed, MtpReading(mtp_concat, mtp_feedback))
        length = max_model_len_of(max_model_len, model)
        per_token, place = cache_token_bytes(probed, head, stored), model.device
        tokens = cache_tokens(kv_cache_tokens, place, per_token, max_num_seqs * length, gpu_memory_utilization)
        config = EngineConfig(
            num_speculative_tokens=num_drafts(num_speculative_tokens, head),
            max_model_len=length,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size,
            num_pages=-(-tokens // max(page_size, 1)) + 1,
            seed=seed,
        )
        if isinstance(draft, (str, Path)):
            self_test_head(head, model, tokenizer, config.num_speculative_tokens)
        with memory_named(place, tokens, per_token):
            return cls(probed, tokenizer, head, backend_, config, cuda_graphs, format=stored)

    @property
    def num_speculative_tokens(self) -> int:
        """K, drafts a round."""
        return self.config.num_speculative_tokens

    @property
    def device(self) -> torch.device:
        """Where the target lives."""
        return self.hf_model.device

    @property
    def dtype(self) -> torch.dtype:
        """The target's dtype."""
        return self.hf_model.dtype

    @property
    def engine_stats(self) -> EngineStats:
        """Counters since loading: rounds, tokens through the target, transfers, preemptions."""
        return self._engine.stats

    def generate(self, prompts: Prompts, params: Params = None) -> list[Completion]:
        """Generate for one prompt or many, batched continuously.

        Args:
            prompts: str, token ids, chat messages, or a list of any of these.
            params: SamplingParams, one for all or one a prompt, or a transformers.GenerationConfig; default greedy.

        Returns:
            One Completion a prompt, in order (num_return_sequences of a GenerationConfig: that many in a row).

        Raises:
            InvalidInputError: a bad prompt or parameter; nothing was started, the model stays usable.
        """
        done = dict(self.generate_iter(prompts, params))
        return [done[i] for i in sorted(done)]

    def generate_iter(self, prompts: Prompts, params: Params = None) -> Iterator[tuple[int, Completion]]:
        """As `generate`, but yield (index, Completion) as each finishes."""
        for update in self.stream(prompts, params):
            if update.completion is not None:
                yield update.index, update.completion

    def stream(self, prompts: Prompts, params: Params = None) -> Iterator[StreamUpdate]:
        """As `generate`, but yield every round's new tokens and text as they are accepted.

        Closing the iterator early aborts what is left.
        """
        ids = encode_prompts(prompts, self.tokenizer)
        requests = self._requests(ids, params)
        return self._run(requests)

    def describe(self) -> dict[str, Any]:
        """Resolved facts of the model, head and engine, for provenance and `specdec inspect`."""
        return facts_of(self)

    def _requests(self, ids: list[list[int]], params: Params) -> list[tuple[list[int], SamplingParams, int]]:
        """(prompt, params, sample index) of every request."""
        if isinstance(params, GenerationConfig):
            copies = params.num_return_sequences or 1
            own = [from_generation_config(params, self.hf_model, len(p)) for p in ids]
            return [(p, s, c) for p, s in zip(ids, own, strict=True) for c in range(copies)]
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(ids)
        else:
            each = list(params)
        if len(each) != len(ids):
            raise InvalidInputError(f"{len(each)} SamplingParams for {len(ids)} prompts; give one, or one a prompt")
        return [(p, s, 0) for p, s in zip(ids, each, strict=True)]

    def _run(self, requests: list[tuple[list[int], SamplingParams, int]]) -> Iterator[StreamUpdate]:
        """Step the engine until these requests are done; what a round brings for another stream waits in its inbox."""
        index: dict[int, int] = {}
        inbox: deque[Update] = deque()
        try:
            for i, (ids, params, sample) in enumerate(requests):
                request_id = self._engine.submit(ids, params, sample)
                index[request_id], self._inboxes[request_id] = i, inbox
            while index:
                for update in [] if inbox else self._engine.step():
                    self._inboxes[update.request_id].append(update)
                if not inbox and not self._engine.has_work:
                    raise SpecdecError("these requests were aborted: a round that they shared with another call failed")
                while inbox:
                    update = inbox.popleft()
                    place = index[update.request_id]
                    if update.completion is not None:
                        del index[update.request_id], self._inboxes[update.request_id]
                    yield StreamUpdate(place, update.token_ids, update.text, update.completion)
        finally:
            self._engine.abort(list(index))
            for request_id in index:
                del self._inboxes[request_id]


def _executor(target: Target, drafter: Drafter | None, config: EngineConfig, cuda_graphs: bool) -> Executor:
    if not cuda_graphs:
        return EagerExecutor(target, drafter, config)
    from specdec.execution.graphs import GraphExecutor

    return GraphExecutor(target, drafter, config)
