"""SpeculativeModel: a Hugging Face causal language model that generates faster with exactly its own output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from attention.backends.base import AttentionBackend
from attention.backends.building import Build
from attention.cache.kv_cache import KVFormat, KVLayout
from drafters.base import Head
from drafters.mtp.convention import Concat, Feedback
from specdec.closing import Closing
from specdec.config import MAX_NUM_PREFILL_TOKENS, EngineConfig
from specdec.engine.ranked import LeadingEngine, make_engine, own_logits
from specdec.engine.sharing import SharedEngine
from specdec.errors import InvalidInputError
from specdec.execution.base import CapturesLate, Executor
from specdec.execution.eager import EagerExecutor
from specdec.interrupts import interrupts_as_they_are
from specdec.loading.assembly import assemble
from specdec.loading.checkpoint import Checkpoint
from specdec.loading.facts import facts_of
from specdec.loading.leading import load_on_all_ranks
from specdec.loading.memory import memory_named
from specdec.loading.parts import Parts, load_parts
from specdec.loading.progress import startup_progress
from specdec.options import LoadOptions, Use
from specdec.parallel.ranks import Ranks
from specdec.requests.generation_config import eos_ids
from specdec.requests.prompts import one_sequence
from specdec.selftest.selftest import self_test
from specdec.torch_state import own_torch_state
from specdec.wrapped.model_check import LiveModel
from specdec.wrapped.probing import TargetProbe
from specdec.wrapped.versions import WeightVersions

MODEL_FORMAT = KVFormat()


class SpeculativeModel(Closing):
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
        tokenizer: its tokenizer.
        head: the draft head, or None.
        config: sizes and limits of the engine.
        generation_config_use: "model" or "ignore", what of the model's own generation_config applies.
        backend_name: the attention backend in use.
        self_test_error: relative logit error of the load-time self-test.
        twin: what a small float32 copy of the model showed at loading, see specdec/selftest/twin.py.
        runners: attention of the target, by cache group, and, with a head, of the head.
        graphs: "on" when rounds run from CUDA graphs, or "off: " and the reason.
        cascade_attention: "on", or "off: " and the reason.
        ranks: among which the target is divided; None with tensor_parallel_size=1. Then `hf_model` is this rank's
            share, whose forward alone is refused.
        checkpoint: where the target was read from; None for a loaded model without a name.
        engine: what runs the rounds, for tools that drive or watch it; for one thread at a time, and never during a
            call on another one.
    """

    @own_torch_state()
    def __init__(
        self,
        probed: TargetProbe,
        tokenizer: Any,
        head: Head | None,
        backend: AttentionBackend,
        config: EngineConfig,
        cuda_graphs: bool | Literal["auto"] = "auto",
        format: KVFormat = MODEL_FORMAT,
        layout: KVLayout = "NHD",
        generation_config: Use = "model",
        checkpoint: Checkpoint | None = None,
        prefix_caching: str | None = None,
        cascade: str = "off",
        ranks: Ranks | None = None,
    ) -> None:
        """Build the engine and run the self-test; prefer `from_pretrained`.

        Args:
            cuda_graphs: compile target and head and run verifications and draft loops from CUDA graphs; "auto": where
                the backend, the head and the model allow it.
            format: how the target's keys and values are stored.
            layout: order inside a page of the target's cache and the head's.
            generation_config: what of the model's own applies; see `from_pretrained`.
            checkpoint: where the target was read from, for `describe`. prefix_caching: see the attribute; default by
                `config`. cascade: see the attribute `cascade_attention`; what `choose_cascade` gave.
            ranks: among which the target is divided; None where this process has all of it.

        Raises:
            InvalidInputError: the backend, the head or the target cannot do with CUDA graphs, or not without; a layer
                attends in chunks that the page size does not divide.
            UnsupportedModelError: the target would come out wrong.
            UnsupportedAttentionError: the backend lacks a variant.
        """
        self.hf_model = probed.model
        self.ranks = ranks
        self.tokenizer = tokenizer
        self.head = head
        self.checkpoint = checkpoint
        self.config = config
        self.generation_config_use = generation_config
        self.backend_name = backend.name
        self.cascade_attention = cascade
        self._prefix_caching = prefix_caching or ("on" if config.enable_prefix_caching else "off")
        with startup_progress() as self._steps:
            made = assemble(probed, head, backend, config, cuda_graphs, format, layout, ranks)
            self.target, self.runners = made.target, made.runners
            self.twin, self.self_test_error, self.graphs = made.twin, made.self_test_error, made.graphs
            self._alterations = made.target.alterations
            with self._alterations.undone_on_error():
                eos = eos_ids(probed.model.generation_config)
                captured = not isinstance(made.executor, EagerExecutor)
                versions = WeightVersions(self.hf_model, head, captured=captured, settings=made.settings)
                self.engine = make_engine(made.target, made.drafter, tokenizer, config, eos, made.executor, versions)
                self._shared = SharedEngine(self.engine, self.device)
                self._live = LiveModel.of(
                    *(self.hf_model, captured, made.settings, made.target.uncalled, made.target.tabulated)
                )
                if isinstance(made.executor, CapturesLate):
                    made.executor.before_capture = self._live.check
                for build in self.builds:
                    build.wait()

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
                compiled at the first rounds; no CUDA graphs.
                "batch_invariant": a token's result has the same bits whatever else is in the batch, so that half
                precision says the same with and without speculation. Not with cuda_graphs=False; slower, see the
                README.
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
            page_size: tokens a page of the KV cache.
            kv_cache_tokens: size of the KV cache, in tokens that the layers without a window hold; default
                max_num_seqs full-length requests, at most what gpu_memory_utilization leaves on a GPU and 1 GiB on CPU.
            kv_cache_dtype: "auto" (the model's) or "fp8": the target's cache in 8 bits (e4m3), half the memory. That
                changes what the model says a little; with and without speculation it still says the same.
            kv_cache_scales: with "fp8", (scale of keys, scale of values) of each layer: x / scale is stored. Default
                the calibrated ones of the checkpoint (compressed-tensors, ModelOpt), else 1.0 everywhere, which cuts
                off values beyond ±448.
            kv_cache_layout: order inside a page of the cache, the target's and the head's: "NHD", token by token, or
                "HND", head by head; "auto" is NHD, or HND where the GPU's kernels read that better (Blackwell). It
                changes no token: only where a key lies.
            hybrid_kv_cache: layers with a sliding window have pages of their own, freed once they are behind it, where
                other layers see further (Gemma 2 and 3, gpt-oss, …): the same memory holds far more tokens.
                False: all layers keep all keys. It changes no token.
            enable_prefix_caching: requests begin with the pages of the cache, the target's and the head's, that earlier
                ones with the same first tokens left there; those least recently used go first when pages are needed.
                "auto": wherever it can be done (`describe` says where not); True: else that is an error. In float32 and
                with "batch_invariant" no token changes; otherwise a prompt is then read in other pieces, which round
                differently, as they do beside other requests. SamplingParams.cache_prefix is the switch of one request.
            cascade_attention: pages that requests of a batch share (prefix caching) are attended once for all of them
                in every round where that takes less time: with short queries on "flashinfer", full attention, a cache
                of the model's dtype; else True is an error. Give True for many requests at once with one
                long common prompt: on an H200, with 2,048 shared and 256 own tokens, attention is 1.6 to 1.9 times
                faster for 32 rows and 1.7 to 3.2 times for 128; for 8 rows only prefixes of about 8,192 tokens pay (1.4
                times). Where nothing is shared it takes 10 % longer in the median of the measured shapes, at most 21 %.
                In half precision sums are rounded in another order, as beside other requests.
            gpu_memory_utilization: share of the GPU's memory that model, cache and graphs may take together.
            cuda_graphs: compile the model and decode from CUDA graphs: many times faster for small batches, after a
                longer start (about a minute the first time). "auto": on a GPU, unless the model cannot be compiled or
                captured, which a SpecdecWarning says; True: that is an error; False: never. In half precision, rounds
                of different sizes then run through different kernels, and more answers differ from those without
                drafts, but with "batch_invariant".
            mtp_concat: what a multi-token-prediction module's projection reads first, "embedding_first" or
                "hidden_first"; "auto" is its family's order.
            mtp_feedback: what such a module's next step gets, "post_norm" or "pre_norm". A plainly wrong choice of
                these two is noticed and refused.
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
            revision: branch, tag or commit of a target on the hub: its configuration, weights, tokenizer and "mtp"
                modules.

        Raises:
            ModelLoadError, UnsupportedModelError: the target; HeadLoadError, HeadMismatchError: the head;
            InvalidInputError: an option outside what is allowed; CacheTooSmallError, OutOfDeviceMemoryError: memory.
        """
        given = dict(locals())  # before any other name is bound: the arguments, see LoadOptions
        options = LoadOptions(**{name: given[name] for name in LoadOptions.__dataclass_fields__})
        with interrupts_as_they_are():
            if options.tensor_parallel_size > 1:
                return load_on_all_ranks(cls._share, target, draft, options)
            parts = load_parts(target, draft, options)
            with memory_named(parts.probed.model.device, parts.cache_tokens, parts.cache_bytes):
                return cls(**_arguments(parts, options))

    @classmethod
    def _share(cls, target: str, draft: str | None, options: LoadOptions, ranks: Ranks) -> SpeculativeModel:
        """As `from_pretrained`, on one of several ranks, which all call it."""
        parts = load_parts(target, draft, options, ranks)
        with memory_named(parts.probed.model.device, parts.cache_tokens, parts.cache_bytes):
            return cls(**_arguments(parts, options), ranks=ranks)

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
        return tuple(dict.fromkeys(build for runner in self.runners for build in runner.builds))

    @property
    def start_seconds(self) -> dict[str, float]:
        """Where the seconds of the start went, by step."""
        return dict(self._steps)

    @property
    def dtype(self) -> torch.dtype:
        """The target's dtype."""
        return self.hf_model.dtype

    @own_torch_state()
    def refresh(self) -> float:
        """After new weight values in place: check that nothing else has changed, and run the self-test again.

        Generation reads the weights at every forward, so it needs no refresh to use new values. A draft head keeps what
        it took over from the target, such as rows of its output embedding: that costs acceptance, and changes no token.

        Returns:
            The new `self_test_error`.

        Raises:
            ModelChangedError: more than values has changed (dtype, device, modules, vocabulary, mode; with CUDA graphs
                also where the weights lie): wrap the model again.
            InvalidInputError: requests are running, whose keys and values are those of the old weights; or this process
                has one share of the weights.
            UnsupportedModelError: the target comes out wrong.
        """
        if self.ranks is not None:
            raise InvalidInputError(
                f"refresh(): with tensor_parallel_size={self.ranks.size} this process has one share of the weights; "
                "save new weights and load them again"
            )
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

        Raises:
            InvalidInputError: no tokens, ids that are no integers, or an id outside the vocabulary.
            RanksLostError: a rank is lost.
        """
        self._shared.check_open()
        largest = self.target.num_embeddings - 1
        ids = one_sequence(token_ids)
        if not ids or not all(0 <= token <= largest for token in ids):
            raise InvalidInputError(
                f"own_logits: give at least one token id, all in 0 … {largest}: one sequence of integers, not text"
            )
        with self._shared.between_rounds():
            if isinstance(self.engine, LeadingEngine):
                found: torch.Tensor = self.engine.run("specdec.engine.ranked:own_logits", ids)
                return found
            return own_logits(self.engine, ids)

    def describe(self) -> dict[str, Any]:
        """Resolved facts of the model, head and engine, for provenance and `specdec inspect`."""
        self._shared.check_open()
        return facts_of(self)


def _arguments(parts: Parts, options: LoadOptions) -> dict[str, Any]:
    """Of `SpeculativeModel`."""
    return {
        "probed": parts.probed,
        "tokenizer": parts.tokenizer,
        "head": parts.head,
        "backend": parts.backend,
        "config": parts.config,
        "cuda_graphs": options.cuda_graphs,
        "format": parts.format,
        "layout": parts.layout,
        "generation_config": options.generation_config,
        "checkpoint": parts.checkpoint,
        "prefix_caching": parts.prefix_caching,
        "cascade": parts.cascade,
    }
