"""SpeculativeModel: a Hugging Face causal language model that generates faster with exactly its own output."""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from specdec.errors import ClosedModelError, InvalidInputError, ModelLoadError, refuse_copy
from specdec.import_names import uncollected
from specdec.interrupts import interrupts_as_they_are
from specdec.loading.progress import startup_progress
from specdec.options.load_options import LoadArguments, LoadOptions, with_load_options
from specdec.requests.prompts import Prompts, ids_within
from specdec.requests.request import Completion
from specdec.requests.shown import model_line, with_bar
from specdec.requests.submission import Check, Params, Score, Submission, check_each, scores, submissions, to_be_scored
from specdec.rounds.extras import no_extras
from specdec.torch_state import own_torch_state
from specdec.values import Json
from specdec.wrapped.group import ALONE, Group

if TYPE_CHECKING:
    from attention.transport.region_tables import EngineTable
    from attention.transport.transports import Transport
    from specdec.engine.scheduler import Usage
    from specdec.engine.stats import EngineStats
    from specdec.engine.streams import Stream, StreamUpdate
    from specdec.extensions.handoff.moved import Handoff, Handoffs
    from specdec.extensions.handoff.transfers import OnFailure, Transfers
    from specdec.extensions.rollouts.new_weights import Weights
    from specdec.extensions.service.asynchronous import AsyncStream
    from specdec.extensions.service.monitoring import Metrics
    from specdec.loading.assembly import Parts
    from specdec.loading.heads import Draft
    from specdec.loading.targets import Target

FREED = ("target", "head", "runners", "engine", "_live")
"""Attributes that `close` deletes."""


class SpeculativeModel:
    """A Hugging Face causal language model that drafts and verifies several tokens a round: load, generate, stream.

    Threads: every method may be called on any thread. Requests of all share one batch; callers that wait run the
    rounds, and a forward of `hf_model` waits for a round's and vice versa. A stream that is not read delays no other; a
    failed request or an interrupted caller ends its own requests only. A call from inside a round (by the tokenizer or
    a hook) is refused with a SpecdecError. Services: docs/service.md. Life: see `close`, which a with-block calls at
    its end, and garbage collection. Several may wrap one `hf_model`.

    Attributes:
        hf_model: the transformers model; its own `generate` works as before. It stays after `close`.
        tokenizer: its tokenizer. head: the draft head, or None. config: sizes and limits of the engine.
        num_speculative_tokens: K, drafts a round. dtype, device: the target's.
        generation_config_use: "model" or "ignore": whether calls start from the model's own generation_config.
        backend_name: the attention backend. runners: attention of each cache group of the target, then of the head.
        self_test_error: relative logit error of the load-time self-test. self_test: which tests ran.
        twin: the test in specdec/selftest/twin.py.
        graphs: "on" when rounds run from CUDA graphs, or "off: " and the reason. cascade_attention: likewise.
        plain_linears: why linear layers on a CPU are plain; "" where they are packed.
        group: processes that run the target together. ranks: the same if several, each `hf_model` a share; else None.
        checkpoint: where the target was read from; None for a loaded model without a name. steps: seconds of the start.
        engine: runs the rounds; for tools, on one thread at a time and never during a call on another one.
    """

    @own_torch_state()
    def __init__(self, parts: Parts, options: LoadOptions, group: Group = ALONE) -> None:
        """Build the engine and run the self-test; prefer `from_pretrained`. Every process of the group calls this.
        Raises InvalidInputError, UnsupportedModelError, UnsupportedAttentionError: see `assemble`."""
        from specdec.engine.sharing import SharedEngine
        from specdec.loading.assembly import assemble

        self.hf_model, self.tokenizer, self.head = parts.probed.model, parts.tokenizer, parts.head
        self.dtype, self.device = self.hf_model.dtype, self.hf_model.device
        self.group, self.ranks = group, group if group.size > 1 else None
        self.config, self.checkpoint = parts.config, parts.checkpoint
        self.num_speculative_tokens = parts.config.num_speculative_tokens
        self.generation_config_use, self._prefix_caching = options.generation_config, parts.prefix_caching
        self.plain_linears = parts.linears
        self.backend_name, self.cascade_attention = parts.backend.name, parts.cascade
        with startup_progress() as self.steps:
            made = assemble(parts, options.cuda_graphs, group)
            self._alterations = made.target.alterations
            with self._alterations.undone_on_error():
                self.target, self.runners, self.engine, self._live = made.target, made.runners, made.engine, made.live
                self.twin, self.self_test_error, self.graphs = made.twin, made.self_test_error, made.graphs
                self.self_test = parts.self_test
                self._shared = SharedEngine(self.engine, self.device)

    @classmethod
    @with_load_options(LoadArguments)
    @startup_progress()
    @own_torch_state()
    def from_pretrained(
        cls,
        target: Target,
        draft: Draft,
        options: LoadOptions,
    ) -> SpeculativeModel:
        """Load a target, and a draft head that fits it.

        Args:
            target: built-in name, folder, GGUF file, hub name, or a loaded transformers model; a peft adapter, which
                names its base, or a PeftModel, whose inner model runs as it is (its adapters live or merged); without
                `draft`, a head whose config.json names its target (as the package speculators does) loads both.
            draft: folder or hub name of a head or of a small causal language model, or a loaded one; "auto": a built-in
                target's, "block": its head that drafts blocks; "mtp": the module in the target's checkpoint; "lookup":
                what followed a request's last tokens in its own text (docs/lookup.md); [head, "lookup"]: both.
            num_speculative_tokens: K, drafts a round; default 5, of a small model by its size (1 to 8).
            backend: attention kernels. "auto": FlashInfer on a GPU, "flex" where it is not installed and on ROCm
                (untested), "torch" (the reference) on a CPU. "flex": FlexAttention, compiled at the first rounds; no
                CUDA graphs. "batch_invariant": results do not depend on the batch, so half precision gives the same
                tokens with and without speculation; slower. Needs CUDA graphs, or a CPU and a dense model.
            dtype: a torch dtype or its name; "auto": the checkpoint's; on a CPU bfloat16, if it is in that and the
                processor computes in it (AVX512-BF16, AMX), else, and for built-in and quantised ones, float32.
            device: default CUDA if there is one.
            cpu_linears: weights of linear layers on a CPU: "packed" in oneDNN's layout, the only copy until `close`, or
                "plain". "auto": packed from 32 MiB on, unless the model was loaded before (docs/targets.md).
            tokenizer: or its folder or hub name; default the target's; needed where that has no name.
            max_model_len: most tokens of one request; default the model's limit, or where its rotary embedding changes.
            max_num_seqs: most requests in one batch.
            max_waiting_requests: most beside it; a call that would bring more is refused (QueueFullError).
            max_num_batched_tokens: most tokens of one forward; default 8192 on a GPU of 40 GiB and more, else 2048.
            max_num_prefill_tokens: prompt tokens of one in which requests of other calls decode, and wait for it.
            page_size: tokens a page of the KV cache.
            kv_cache_tokens: its size, of layers that see all; default what fits, or 1 GiB on a CPU.
            kv_cache_dtype: "auto" (the model's), or "fp8": 8 bits (e4m3), which changes its tokens a little.
            kv_cache_scales: with it, (of keys, of values) of each layer: x / scale is stored. Default the checkpoint's
                (compressed-tensors, ModelOpt), else 1.0, which clips beyond ±448.
            recurrent_state_dtype: "float32"; "bfloat16": half the memory, drafts change answers (docs/targets.md).
            kv_cache_layout: inside a page, "NHD" or "HND", which changes no token; "auto": HND on Blackwell, else NHD.
            hybrid_kv_cache: beside layers that see all, those with a window or in chunks free pages that they passed.
            enable_prefix_caching: reuse pages of earlier requests with the same first tokens. "auto": if possible;
                True: else an error. May change half-precision tokens (not with "batch_invariant").
            cascade_attention: attend pages that requests share once for all where that is faster (short queries); sums
                are rounded in another order. Needs "flashinfer", full attention, a cache of the model's dtype.
            gpu_memory_utilization: share of the GPU's memory for model, cache and graphs.
            cuda_graphs: compile the model and decode from CUDA graphs: many times faster, after a minute's start the
                first time. "auto": on a GPU; off, with a SpecdecWarning, where capture fails; True: that is an error.
                Half-precision rounds of different sizes then use different kernels (not with "batch_invariant").
            mtp_concat: input of an MTP module: "embedding_first" or "hidden_first"; "auto": its family's.
            mtp_feedback: input of its next step, "post_norm" or "pre_norm".
            draft_vocab: ids of the tokens that it drafts on (`specdec.draft_vocab_of`), or a JSON file of them; eos and
                special tokens are added. Drafts read these rows of lm_head alone: docs/how-to/mtp.md.
            head_overrides: corrections to an EAGLE head's config.json by its keys ("rope_theta", …; None removes one),
                or "aux_layers", "feedback" ("pre_norm", "post_norm"). Facts that the tensors show cannot be overridden.
            lookup_min: tokens of the shortest match that drafts by lookup follow, see docs/lookup.md.
            lookup_max: tokens up to which matches are compared.
            lookup_shared: look into the texts of ended requests, too.
            generation_config: "model": calls without SamplingParams start from the model's own, as in transformers'
                `generate`, and are refused where it has what cannot be served. "ignore": only its eos ids apply.
            sampling: "rejection"; "keyed": K and head change no sampled token either (docs/concepts/exactness.md).
            draft_sampling: how a head drafts for sampled requests: "probabilistic" or "greedy"; answers stay the same.
            min_confidence: drafts from the first one of less confidence on are not verified (docs/targets.md).
            tensor_parallel_size: N GPUs of this machine (on a CPU, processes) that share the target: docs/parallel.md.
            seed: of requests without one, 64 bits.
            adapter: of peft, by folder or hub name, for a target given by name.
            merge_adapter: "auto" or True: add the adapter to the weights at loading, as by peft's merge_and_unload; on
                quantised or shared (tied) weights "auto" runs it live, True is an error. False: live: more launches.
            self_test: "cached": test target and head, unless an earlier start did and nothing has changed since;
                "full": test them; "quick": with short rows alone (docs/targets.md).
            trust_remote_code: run the checkpoint's Python files (on the hub, anybody's).
            revision: branch, tag, commit.
            gguf_file: the GGUF file in a folder or hub model; its path is a target by itself: docs/how-to/gguf.md.

        Raises:
            ModelLoadError, UnsupportedModelError: the target; HeadLoadError, HeadMismatchError: the head;
            InvalidInputError: an option outside what is allowed; CacheTooSmallError, OutOfDeviceMemoryError: memory.
        """
        with interrupts_as_they_are():
            if options.tensor_parallel_size == 1:
                return cls.in_group(target, draft, options, ALONE)
            from specdec.loading.names import is_gguf

            if is_gguf(target, options.gguf_file):
                raise InvalidInputError(
                    "tensor_parallel_size: a GGUF file is read by one process; give 1, or the model in safetensors"
                )
            try:
                from specdec.extensions.parallel.loading import load_divided
            except ImportError as error:
                raise ModelLoadError(f"tensor_parallel_size={options.tensor_parallel_size}: {error}") from error
            return load_divided(cls.in_group, target, draft, options)

    @classmethod
    def in_group(cls, target: Any, draft: Any, options: LoadOptions, group: Group) -> SpeculativeModel:
        """As `from_pretrained`, in a process of a group, all of which call it."""
        with uncollected():  # torch and transformers' models are imported now, and not with this file
            from specdec.loading.parts import load_parts
            from specdec.loading.sizes import memory_named

        try:
            from specdec.extensions import round_extras as more_extras
        except ImportError:
            more_extras = no_extras
        parts = load_parts(target, draft, options, group, more_extras)
        with memory_named(parts.probed.model.device, parts.cache_tokens, parts.cache_bytes):
            return cls(parts, options, group)

    @property
    def prefix_caching(self) -> str:
        """ "on"; "within each call: " or "off: " and the reason."""
        reason = self.engine.forgets_prefixes
        return f"within each call: {reason}" if reason else self._prefix_caching

    @property
    def engine_stats(self) -> EngineStats:
        """Counters since loading: rounds, tokens through the target, transfers, preemptions."""
        return self._shared.stats

    def usage(self) -> Usage:
        """Requests, and the rows and pages that they hold. Waits for a round; changes nothing, and requests go on.

        >>> model.usage().requests, model.usage().rows
        (0, 0)

        Raises SpecdecError inside a round; InvariantError, with SPECDEC_CHECK=1, when a page has no owner, or two."""
        return self._shared.usage()

    def generate(
        self, prompts: Prompts = None, params: Params = None, *, progress: bool = False, **options: Any
    ) -> list[Completion]:
        """Generate for one prompt or many, batched continuously; see `specdec.engine.admission` for their order.

        Args:
            prompts: text (read as it is, without the chat template), token ids, chat messages, or a list of these; a
                tensor or array of ids (1-D, or 2-D: one a row); a BatchEncoding, or its fields (`generate(**inputs)`).
            params: SamplingParams, to which nothing is added, or a GenerationConfig, for all or one a prompt. Default:
                as the model's generation_config has it, as in transformers.
            progress: show a bar.
            options: fields of SamplingParams, as `temperature=0.7`, which replace those; `chat=True`: each text is what
                the user says in a chat; `tools`, `documents`, `chat_template`, `chat_template_kwargs`,
                `continue_final_message`, `add_generation_prompt`: as in transformers' apply_chat_template, and
                `split_special_tokens` (docs/tools.md). Names of transformers and vLLM: `specdec.options.arguments`.

        Returns:
            One Completion a prompt, in order (with SamplingParams.n or GenerationConfig.num_return_sequences so many).

        Raises:
            InvalidInputError: a bad prompt or parameter; nothing was started. ClosedModelError: closed, also by another
                thread meanwhile. ModelChangedError: `hf_model` was moved, recast, resized or rebuilt. RoundFailedError:
                a round failed twice. RequestFailedError, at the end: a tokenizer or code of the user's raised.
        """
        from specdec.engine.streams import collected, completed

        return collected((with_bar if progress else completed)(self.stream(prompts, params, **options)))

    def generate_iter(
        self, prompts: Prompts = None, params: Params = None, **options: Any
    ) -> Iterator[tuple[int, Completion]]:
        """As `generate`, but yield (index, Completion) as each finishes. Reads an iterator lazily: docs/batches.md.
        Closing it early ends the requests that are left; the model then serves other calls.

        >>> sorted((i, len(done.token_ids)) for i, done in model.generate_iter([[5, 6], [7]], max_new_tokens=3))
        [(0, 3), (1, 3)]"""
        from specdec.engine.feeding import generated

        yield from generated(self.stream, prompts, params, options, self.config.max_num_seqs)

    def stream(self, prompts: Prompts = None, params: Params = None, **options: Any) -> Stream:
        """As `generate`, but yield every round's new tokens and text. Closing the iterator, on any thread, aborts the
        rest. Bad input and a closed or changed model raise here, others from the iterator."""
        own, check = (self.hf_model, self.tokenizer, self.generation_config_use), self._begun_check()
        with interrupts_as_they_are():
            return self._stream(submissions(prompts, params, *own, options, self.config.max_model_len), check)

    async def generate_async(self, prompts: Prompts = None, params: Params = None, **options: Any) -> list[Completion]:
        """As `generate`, awaited: the event loop is not blocked, and a cancelled await cancels its requests."""
        return await self.stream_async(prompts, params, **options).completions()

    def stream_async(self, prompts: Prompts = None, params: Params = None, **options: Any) -> AsyncStream:
        """As `stream`, for `async for`: see docs/service.md. Bad input raises as it is read, or by `start`."""
        from specdec.extensions.service.leading import stream_of

        return stream_of(self, prompts, params, options)

    def metrics(self) -> Metrics:
        """Numbers for monitoring, also as Prometheus text. Never waits for a round. Raises ClosedModelError."""
        from specdec.extensions.service.monitoring import metrics_of

        return metrics_of(self.engine)

    def drain(self, timeout: float | None = None) -> int:
        """Wait until all requests have ended; new ones are refused meanwhile (DrainingError). After `timeout` seconds
        the others are cancelled, with the tokens that they have: returns how many these are."""
        from specdec.extensions.service.draining import drain

        return drain(self, timeout)

    async def aclose(self, timeout: float | None = None) -> int:
        """As `drain`, then `close`, awaited."""
        from specdec.extensions.service.draining import drain_and_close

        return await to_thread(drain_and_close, self, timeout)

    def score(self, prompts: Prompts, completions: Prompts, *, logprobs: int = 0, **options: Any) -> list[Score]:
        """Log-probabilities of given completions, in one batch; prompts' common beginnings are read once. prompts: as
        for `generate`, one for each completion, or one. completions: texts (tokenised without special tokens) or ids.
        logprobs: alternatives of each. options: `chat`, the template's; `temperature`, `top_k`, `top_p`, `min_p`."""
        from specdec.engine.streams import completed

        check = self._begun_check()
        with interrupts_as_they_are():
            requests = to_be_scored(prompts, completions, logprobs, self.tokenizer, self.device, options)
            stream = self._stream(requests, check)
        return scores(completed(stream))

    def _begun_check(self) -> Check:
        """Whether `hf_model` is what it was, found out while the prompts are read. Raises ClosedModelError."""
        self._shared.check_open()
        return self._live.begin_check()

    def _stream(self, requests: list[Submission], check: Check) -> Stream:
        from specdec.engine.streams import Stream

        check_each(requests, lambda request: self.engine.admission.check(request.token_ids, request.params))
        return Stream(self._shared, requests, check=check)

    def refresh(self) -> float:
        """Check a model whose weight values were changed in place: test it again and return its `self_test_error`.

        Generation uses new values at once; rows of `draft_vocab` are copied here. A head's own weights stay: that costs
        acceptance alone. Afterwards the prefix cache is empty. A model that fails is not closed, but may be wrong.

        >>> model.hf_model.lm_head.weight.data *= 1.01
        >>> model.refresh() < 1e-3
        True

        Raises:
            ModelChangedError: more than values has changed (with CUDA graphs also addresses): wrap the model again.
            UnsupportedModelError: the self-test failed. InvalidInputError: requests run, or this process has a share.
        """
        from specdec.extensions.rollouts.new_weights import renew

        return renew(self, "refresh()", lambda: None)

    def update_weights(self, weights: Weights, *, head: Weights = ()) -> float:
        """Copy new values into `hf_model`, and into the head, in place, then `refresh`; returns the same.

        weights, head: by names of their `state_dict`, all or some, in a mapping or as pairs; see docs/rollouts.md.
        Raises InvalidInputError for a name or shape that is not there, and while requests run; else as `refresh`."""
        from specdec.extensions.rollouts.new_weights import renew, write

        return renew(self, "update_weights()", lambda: write(self, weights, head))

    @own_torch_state()
    def own_logits(self, token_ids: Sequence[int]) -> Tensor:
        """[T, V]: logits of the model's own forward after each of these tokens, without cache and head. Waits
        for a round; requests, caches and statistics stay as they are.

        >>> model.own_logits([5, 6]).argmax(-1)[-1] == model.generate([5, 6], max_new_tokens=1)[0].token_ids[0]
        tensor(True)"""
        from specdec.wrapped.target import own_logits

        self._shared.check_open()
        ids = ids_within(token_ids, self.target.num_embeddings)
        with self._shared.between_rounds():
            return self.group.run(own_logits, self.engine, ids)

    def open_transfer(self, transport: str | Transport = "local", **options: Any) -> EngineTable:
        """Choose the transport by which requests move between this model and others: see `Transfers.open`."""
        return self._moves.open(transport, options)

    def prefill(self, prompts: Prompts, params: Params = None, *, lease_seconds: float = 60.0) -> list[Handoff]:
        """Read prompts, for another model to continue after the first token: see `Transfers.prefill`."""
        return self._moves.prefill(prompts, params, lease_seconds)

    def release(self, handoffs: Handoffs) -> None:
        """Free requests that this model handed over and that no model will continue: see `Transfers.release`."""
        self._moves.release(handoffs)

    def resume(self, handoffs: Handoffs, *, timeout: float = 30.0, on_failure: OnFailure = "raise") -> list[Completion]:
        """Continue requests that another model has handed over: see `Transfers.resume`."""
        return self._moves.resume(handoffs, timeout, on_failure)

    def stream_resumed(
        self, handoff: Handoff, *, timeout: float = 30.0, on_failure: OnFailure = "raise"
    ) -> Iterator[StreamUpdate]:
        """As `resume` of one, but yield every round's new tokens and text: see `Transfers.stream_resumed`."""
        return self._moves.stream_resumed(handoff, timeout, on_failure)

    @property
    def _moves(self) -> Transfers:
        """Of the optional package `specdec.extensions.handoff`. Raises InvalidInputError if it is missing."""
        try:
            from specdec.extensions.handoff.transfers import transfers_of
        except ImportError as error:
            missing = f"requests cannot move between models without specdec.extensions.handoff: {error}"
            raise InvalidInputError(missing) from error
        return transfers_of(self)

    def describe(self) -> Json:
        """Resolved facts of the model, head and engine."""
        from specdec.loading.facts import facts_of

        self._shared.check_open()
        return facts_of(self)

    def close(self) -> None:
        """End all requests, free caches, graphs and other ranks' processes, and restore `hf_model`. Idempotent.

        Unfinished requests raise ClosedModelError after their last update, later calls at once. Waits for another
        thread's round. A GPU that waits for a lost rank keeps its memory. Raises SpecdecError inside a round."""
        from specdec.loading.assembly import dismantle

        self._shared.close()  # from here on every step can be done twice: an interrupted close() is called again
        if (leader := vars(self).get("_leader")) is not None:
            leader.end()
        dismantle(self, FREED)

    __repr__, __reduce_ex__ = model_line, refuse_copy

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Only for what `close` has freed. Raises ClosedModelError, or AttributeError for any other name."""
            if name in FREED and "_shared" in vars(self):
                raise ClosedModelError(f"this SpeculativeModel is closed: its {name.lstrip('_')} is freed")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
