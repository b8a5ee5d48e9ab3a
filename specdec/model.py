"""SpeculativeModel: a Hugging Face causal language model that generates faster with exactly its own output."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

import torch
from transformers import PreTrainedModel

from attention.backends.building import Build
from drafters.base import Head
from drafters.mtp.convention import Concat, Feedback
from specdec.config import MAX_NUM_PREFILL_TOKENS
from specdec.engine.scheduler import Usage
from specdec.engine.sharing import SharedEngine
from specdec.engine.stats import EngineStats
from specdec.engine.streams import Stream, StreamUpdate
from specdec.errors import ClosedModelError, InvalidInputError, ModelLoadError, NotCopyableError
from specdec.execution.base import Executor
from specdec.interrupts import interrupts_as_they_are
from specdec.loading.assembly import Parts, assemble, builds_of
from specdec.loading.facts import facts_of
from specdec.loading.memory import memory_named
from specdec.loading.parts import load_parts
from specdec.loading.progress import startup_progress
from specdec.options import LoadOptions, Use
from specdec.requests.prompts import Prompts, ids_within
from specdec.requests.request import Completion
from specdec.requests.submission import Params, check_each, submissions
from specdec.selftest.selftest import self_test
from specdec.torch_state import own_torch_state
from specdec.wrapped.group import ALONE, Group
from specdec.wrapped.target import own_logits

if TYPE_CHECKING:
    from attention.transport.region_tables import EngineTable
    from attention.transport.transports import Transport
    from specdec.handoff.moved import Handoff
    from specdec.handoff.transfers import OnFailure, Transfers

_FREED = ("target", "head", "runners", "engine", "_live")
"""What `close` lets go of."""


class SpeculativeModel:
    """The public face: load, generate, stream.

    Threads: `generate`, `generate_iter`, `stream`, `describe` and `engine_stats` may be called on any thread, and from
    asyncio through `asyncio.to_thread`. Requests of all threads share one batch; there is no engine thread: whoever
    waits for results runs the rounds. A stream that is not read delays nobody. A request that fails and a caller that
    is interrupted or goes away end their own requests only. `hf_model` may be called on another thread meanwhile: its
    forward and that of a round wait for each other. A call from inside a round (from the tokenizer's `decode` or a
    hook of the model) is refused with a SpecdecError.

    Life: `close()`, or the end of a with-block, ends what runs, frees caches and graphs, and leaves `hf_model` as it
    was before. So does the garbage collector once nobody has the object or a stream of it. A closed model raises
    ClosedModelError. Several may wrap the same `hf_model`.

    Attributes:
        hf_model: the transformers model; its own `generate` works as before. It stays after `close`.
        tokenizer: its tokenizer. head: the draft head, or None. config: sizes and limits of the engine.
        generation_config_use: "model" or "ignore", what of the model's own generation_config applies.
        backend_name: the attention backend in use.
        self_test_error: relative logit error of the load-time self-test.
        twin: what a small float32 copy of the model showed at loading, see specdec/selftest/twin.py.
        runners: attention of the target, by cache group, and, with a head, of the head.
        graphs: "on" when rounds run from CUDA graphs, or "off: " and the reason. cascade_attention: likewise.
        group: the processes that run the target together. ranks: the same where they are several, else None. With
            several, `hf_model` is this process's share, whose forward alone is refused.
        checkpoint: where the target was read from; None for a loaded model without a name.
        engine: what runs the rounds, for tools that drive or watch it; for one thread at a time, and never during a
            call on another one.
    """

    @own_torch_state()
    def __init__(self, parts: Parts, options: LoadOptions, group: Group = ALONE) -> None:
        """Build the engine and run the self-test; prefer `from_pretrained`. Every process of the group calls this.
        Raises InvalidInputError, UnsupportedModelError, UnsupportedAttentionError: see `assemble`."""
        self.hf_model, self.tokenizer, self.head = parts.probed.model, parts.tokenizer, parts.head
        self.group, self.ranks = group, group if group.size > 1 else None
        self.config, self.checkpoint = parts.config, parts.checkpoint
        self.generation_config_use = options.generation_config
        self.backend_name, self.cascade_attention = parts.backend.name, parts.cascade
        self._prefix_caching = parts.prefix_caching
        with startup_progress() as self._steps:
            made = assemble(parts, options.cuda_graphs, group)
            self._alterations = made.target.alterations
            with self._alterations.undone_on_error():
                self.target, self.runners, self.engine, self._live = made.target, made.runners, made.engine, made.live
                self.twin, self.self_test_error, self.graphs = made.twin, made.self_test_error, made.graphs
                self._shared = SharedEngine(self.engine, self.device)

    @classmethod
    @startup_progress()
    @own_torch_state()
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
        max_num_prefill_tokens: int = MAX_NUM_PREFILL_TOKENS,
        page_size: int = 16,
        kv_cache_tokens: int | None = None,
        kv_cache_dtype: str = "auto",
        kv_cache_scales: Sequence[tuple[float, float]] | None = None,
        kv_cache_layout: str = "auto",
        hybrid_kv_cache: bool = True,
        enable_prefix_caching: bool | Literal["auto"] = "auto",
        cascade_attention: bool = False,
        gpu_memory_utilization: float = 0.9,
        cuda_graphs: bool | Literal["auto"] = "auto",
        mtp_concat: Concat = "auto",
        mtp_feedback: Feedback = "post_norm",
        head_overrides: Mapping[str, Any] | None = None,
        generation_config: Use = "model",
        draft_sampling: str = "probabilistic",
        tensor_parallel_size: int = 1,
        seed: int = 0,
        adapter: str | None = None,
        merge_adapter: bool | Literal["auto"] = "auto",
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> SpeculativeModel:
        """Load a target, and a draft head that fits it.

        Args:
            target: built-in name, folder, hub name, or a loaded transformers model; an adapter of peft, which names its
                base, or a PeftModel, whose inner model runs as it is (its adapters live or merged). A head alone,
                without `draft`, whose config.json names its target (as the package speculators does), stands for both.
            draft: folder or hub name of a head, "auto" for a built-in target's own, "mtp" for the multi-token-
                prediction module in the target's checkpoint, a loaded head, or None.
            num_speculative_tokens: K, drafts a round; default 5 with a head, 0 without.
            backend: attention kernels. "auto": FlashInfer on a GPU, "flex" where it is not installed and on ROCm builds
                of torch (untested on such hardware), "torch" (the reference) on a CPU. "flex": torch's FlexAttention,
                compiled at the first rounds; no CUDA graphs. "batch_invariant": a token's result has the same bits
                whatever else is in the batch, so half precision gives the same tokens with and without speculation;
                slower (README), and not with cuda_graphs=False.
            dtype: "auto" (float32 on CPU, the checkpoint's on a GPU) or a torch dtype or its name.
            device: default CUDA where there is one; a loaded model stays as it is.
            tokenizer: a tokenizer, or the folder or hub name of one; default the target's own; needed when `target` is
                a model without a name.
            max_model_len: most tokens of one request; default the model's limit, or where its rotary embedding begins
                to depend on the longest request of the batch (longrope, dynamic).
            max_num_seqs: most requests in one batch.
            max_num_batched_tokens: most tokens of one forward; longer prompts are read in chunks.
            max_num_prefill_tokens: most prompt tokens of a forward in which other requests decode, all prompts
                together. More make their tokens wait longer, fewer make prompts wait longer; the answers stay the same.
            page_size: tokens a page of the KV cache. kv_cache_tokens: its size, in tokens that the layers without a
                window hold; default max_num_seqs full-length requests, at most what gpu_memory_utilization leaves on a
                GPU and 1 GiB on CPU.
            kv_cache_dtype: "auto" (the model's) or "fp8": the target's cache in 8 bits (e4m3), half the memory. That
                changes the model's tokens a little; they are still the same with and without speculation.
            kv_cache_scales: with "fp8", (scale of keys, scale of values) of each layer: x / scale is stored. Default
                the calibrated ones of the checkpoint (compressed-tensors, ModelOpt), else 1.0 everywhere, which cuts
                off values beyond ±448.
            kv_cache_layout: order inside a page of both caches, which changes no token: "NHD", token by token, "HND",
                head by head, or "auto": NHD, or HND where the GPU's kernels read that better (Blackwell).
            hybrid_kv_cache: layers with a sliding window have pages of their own, freed once they are behind it, where
                other layers see further (Gemma 2 and 3, gpt-oss, …): the same memory holds far more tokens, and no
                token changes. False: all layers keep all keys.
            enable_prefix_caching: requests begin with the pages of the cache, the target's and the head's, that earlier
                ones with the same first tokens left there; those least recently used go first when pages are needed.
                "auto": wherever it can be done (`describe` says where not); True: else that is an error. In float32 and
                with "batch_invariant" no token changes; otherwise a prompt is then read in other pieces, which round
                differently, as they do beside other requests. SamplingParams.cache_prefix is the switch of one request.
            cascade_attention: pages that requests of a batch share (prefix caching) are attended once for all of them
                in every round where that takes less time: with short queries on "flashinfer", full attention, a cache
                of the model's dtype; else True is an error. For many requests at once with one long common prompt: on
                an H200, with 2,048 shared and 256 own tokens, attention is 1.6 to 1.9 times faster for 32 rows and 1.7
                to 3.2 times for 128; for 8 rows only prefixes of about 8,192 tokens pay (1.4 times). Where nothing is
                shared it takes 10 % longer (median of the measured shapes), at most 21 %. In half precision sums are
                rounded in another order, as beside other requests.
            gpu_memory_utilization: share of the GPU's memory that model, cache and graphs may take together.
            cuda_graphs: compile the model and decode from CUDA graphs: many times faster for small batches, after a
                longer start (about a minute the first time). "auto": on a GPU, unless the model cannot be compiled or
                captured, which a SpecdecWarning says; True: that is an error; False: never. In half precision, rounds
                of different sizes then run through different kernels, and more answers differ from those without
                drafts, but with "batch_invariant".
            mtp_concat, mtp_feedback: of a multi-token-prediction module: what its projection reads first,
                "embedding_first" or "hidden_first" ("auto" is its family's order), and what its next step gets,
                "post_norm" or "pre_norm". A plainly wrong choice is noticed and refused.
            head_overrides: what you know better than an EAGLE head's config.json, by its keys ("rope_theta",
                "eagle_config.norm_output", …; None removes one), or "aux_layers" (layer boundaries) and "feedback"
                ("pre_norm", "post_norm"). What the tensors show cannot be overridden.
            generation_config: "model": the model's own generation_config applies as in transformers' `generate`. What
                of it changes the model's greedy tokens and is not supported (repetition_penalty, suppress_tokens, …)
                is refused by the first request, by name. "ignore": only its eos ids apply, to requests with
                SamplingParams and with a GenerationConfig; `describe` says what is switched off.
            draft_sampling: how drafts of sampled requests are chosen: "probabilistic", drawn from the head's own
                distribution under the request's temperature and filters, or "greedy", its most probable token. Both
                leave the distribution of the answers as it is; they differ in how many drafts are accepted.
            tensor_parallel_size: N GPUs of this machine (on a CPU, N processes) that the target is divided among, one
                process each: this one and N-1 that are started here and end with `close`. Needs the extra [parallel].
                Target and draft by name only. The head is whole on every rank. See docs/parallel.md.
            seed: randomness of requests without a seed of their own: 64 bits, with or without a sign.
            adapter: folder or hub name of an adapter of peft (LoRA and the like) for a target given by name.
            merge_adapter: "auto" or True: such an adapter is added to the weights at loading, as by peft's
                merge_and_unload, and costs nothing per token; in half precision the sum is rounded once. Over quantised
                weights, and over ones that two modules share (tied embeddings), "auto" runs it live, True is an error.
                False: live, the arithmetic of the PeftModel itself: more launches per layer, and no fused projections.
            trust_remote_code: run the Python files of the target's checkpoint (on the hub, anybody's).
            revision: branch, tag or commit of a target on the hub: of its configuration, weights, tokenizer, "mtp".

        Raises:
            ModelLoadError, UnsupportedModelError: the target; HeadLoadError, HeadMismatchError: the head;
            InvalidInputError: an option outside what is allowed; CacheTooSmallError, OutOfDeviceMemoryError: memory.
        """
        given = dict(locals())  # before any other name is bound: the arguments, see LoadOptions
        options = LoadOptions(**{name: given[name] for name in LoadOptions.__dataclass_fields__})
        with interrupts_as_they_are():
            if options.tensor_parallel_size == 1:
                return cls.in_group(target, draft, options, ALONE)
            try:
                from specdec.parallel.loading import load_divided
            except ImportError as error:
                raise ModelLoadError(f"tensor_parallel_size={tensor_parallel_size}: {error}") from error
            return load_divided(cls.in_group, target, draft, options)

    @classmethod
    def in_group(cls, target: Any, draft: Any, options: LoadOptions, group: Group) -> SpeculativeModel:
        """As `from_pretrained`, in a process of a group, all of which call it."""
        parts = load_parts(target, draft, options, group)
        with memory_named(parts.probed.model.device, parts.cache_tokens, parts.cache_bytes):
            return cls(parts, options, group)

    @property
    def num_speculative_tokens(self) -> int:
        """K, drafts a round."""
        return self.config.num_speculative_tokens

    @property
    def prefix_caching(self) -> str:
        """ "on"; "within each call: " or "off: " and the reason."""
        reason = self.engine.forgets_prefixes
        return f"within each call: {reason}" if reason else self._prefix_caching

    @property
    def executor(self) -> Executor:
        """How rounds run on the device."""
        return self.engine.executor

    @property
    def builds(self) -> tuple[Build, ...]:
        """Attention kernels that were built or loaded in the background."""
        return builds_of(self.runners)

    @property
    def start_seconds(self) -> dict[str, float]:
        """Where the seconds of the start went, by step."""
        return dict(self._steps)

    @property
    def dtype(self) -> torch.dtype:
        """The target's dtype."""
        return self.hf_model.dtype

    @property
    def device(self) -> torch.device:
        """Where the target lives."""
        return self.hf_model.device

    @property
    def engine_stats(self) -> EngineStats:
        """Counters since loading: rounds, tokens through the target, transfers, preemptions."""
        return self._shared.stats

    def usage(self) -> Usage:
        """What requests hold: requests waiting and running, rows, pages of both caches; 0 when idle. Waits for the end
        of a round that another thread runs. Raises InvariantError with SPECDEC_CHECK=1, when a page of a cache has no
        owner, or two, and SpecdecError inside a round."""
        return self._shared.usage()

    def generate(self, prompts: Prompts, params: Params = None) -> list[Completion]:
        """Generate for one prompt or many, batched continuously.

        Where they are more than `max_num_seqs`, they begin in their order, but for those with so large a
        `max_new_tokens` that they would end after all others: these begin earlier (`specdec.engine.admission`).

        Args:
            prompts: str, token ids, chat messages, or a list of any of these; a tensor or array of ids (1-D: a prompt,
                2-D: one a row); a BatchEncoding, or a dict of input_ids and attention_mask, padded on either side.
            params: SamplingParams or a transformers.GenerationConfig, one for all or one a prompt; default greedy.

        Returns:
            One Completion a prompt, in order (with SamplingParams.n or GenerationConfig.num_return_sequences so many).

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
        """As `generate`, but yield every round's new tokens and text. Closing the iterator early, on any thread, aborts
        what is left.

        Raises:
            InvalidInputError, ClosedModelError, ModelChangedError: as `generate`; the others come from the iterator.
        """
        self._shared.check_open()
        check = self._live.begin_check()
        with interrupts_as_they_are():
            requests = submissions(prompts, params, self.hf_model, self.tokenizer, self.generation_config_use)
            check_each(requests, lambda request: self.engine.check(request.token_ids, request.params))
        return Stream(self._shared, requests, check=check)

    @own_torch_state()
    def refresh(self) -> float:
        """After new weight values in place: check that nothing else has changed, and run the self-test again.

        Generation reads the weights at every forward, so it needs no refresh to use new values. A draft head keeps what
        it took over from the target, such as rows of its output embedding: that costs acceptance, and changes no token.

        Returns:
            The new `self_test_error`.

        Raises:
            ModelChangedError: more than values has changed (dtype, device, modules, vocabulary, mode; with CUDA graphs
                also where the weights lie): wrap the model again. UnsupportedModelError: the target comes out wrong.
            InvalidInputError: requests are running, whose keys and values are those of the old weights; or this process
                has one share of the weights.
        """
        self.group.check_whole("refresh()", "save new weights and load them again")
        with self._shared.between_rounds() as idle:
            if not idle:
                raise InvalidInputError(
                    "requests are running on the old weights; finish or close them before refresh()"
                )
            self._live.check()
            self.engine.forget_prefixes()  # of the old weights, and the self-test writes to the first pages
            with interrupts_as_they_are():
                self.self_test_error = self_test(self.target)
        return self.self_test_error

    @own_torch_state()
    def own_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V]: logits of the model's own forward after each of these tokens, without cache and head; on all ranks.

        Raises InvalidInputError: no tokens, ids that are no integers, or an id outside the vocabulary; RanksLostError.
        """
        self._shared.check_open()
        ids = ids_within(token_ids, self.target.num_embeddings, "own_logits")
        with self._shared.between_rounds():
            return self.group.run(own_logits, self.engine, ids)

    def open_transfer(self, transport: str | Transport = "local", **options: Any) -> EngineTable:
        """Choose how requests get from this model into others, and from others into this one: see `Transfers.open`."""
        return self._moves.open(transport, options)

    def prefill(self, prompts: Prompts, params: Params = None, *, lease_seconds: float = 60.0) -> list[Handoff]:
        """Read prompts, and hand the requests over to another model after their first token: `Transfers.prefill`."""
        return self._moves.prefill(prompts, params, lease_seconds)

    def release(self, handoffs: Handoff | Sequence[Handoff]) -> None:
        """Let go of requests that this model handed over and that nobody will continue: see `Transfers.release`."""
        self._moves.release(handoffs)

    def resume(
        self, handoffs: Handoff | Sequence[Handoff], *, timeout: float = 30.0, on_failure: OnFailure = "raise"
    ) -> list[Completion]:
        """Continue requests that another model has handed over: see `Transfers.resume`."""
        return self._moves.resume(handoffs, timeout, on_failure)

    def stream_resumed(
        self, handoff: Handoff, *, timeout: float = 30.0, on_failure: OnFailure = "raise"
    ) -> Iterator[StreamUpdate]:
        """As `resume` of one, but yield every round's new tokens and text: see `Transfers.stream_resumed`."""
        return self._moves.stream_resumed(handoff, timeout, on_failure)

    @property
    def _moves(self) -> Transfers:
        """Of the optional package `specdec.handoff`. Raises InvalidInputError: it is not there."""
        try:
            from specdec.handoff.transfers import transfers_of
        except ImportError as error:
            raise InvalidInputError(f"requests cannot move between models without specdec.handoff: {error}") from error
        return transfers_of(self)

    def describe(self) -> dict[str, Any]:
        """Resolved facts of the model, head and engine, for provenance and `specdec inspect`."""
        self._shared.check_open()
        return facts_of(self)

    def close(self) -> None:
        """End what runs, free caches, buffers and graphs, and leave `hf_model` as it was before. Idempotent.

        Requests and streams that are not finished raise ClosedModelError, after what was reported to them before. Waits
        for a round or a forward that runs on another thread. `hf_model`, `tokenizer`, `config`, `engine_stats` and what
        the self-test found stay readable. Of a tensor-parallel model the other ranks' processes end; where a GPU waits
        for a lost one, nothing can be freed before this process ends. Raises SpecdecError when it is called from inside
        a round (from the tokenizer or a hook of the model)."""
        self._shared.close()  # from here on every step can be done twice: an interrupted close() is called again
        self.group.close()
        device = self.device
        if device.type == "cuda" and self.group.lost:
            return  # a sum may still wait on the device for a rank that is gone, and so would whoever waits for it
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if (transfers := vars(self).get("_transfers")) is not None:
            transfers.close()
        freed = bool([vars(self).pop(name) for name in _FREED if name in vars(self)])
        if freed and not self._shared.forked:  # a fork would first copy the memory of all objects
            gc.collect()  # compiled code and graphs refer to themselves
        self._alterations.undo()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Only for what `close` has freed. Raises ClosedModelError, or AttributeError for any other name."""
            if name in _FREED and "_shared" in vars(self):
                raise ClosedModelError(f"this SpeculativeModel is closed: its {name.lstrip('_')} is freed")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raises NotCopyableError: pickle, copy and deepcopy end here."""
        raise NotCopyableError(
            "a SpeculativeModel cannot be copied or pickled: it holds caches and device memory; call "
            "SpeculativeModel.from_pretrained where it is needed (in the other process)"
        )
