"""Builds the parts of an engine from a target, a draft and options: model, head, kernels and the sizes of caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import cached_file

from attention.backends.base import AttentionBackend, GraphBackend
from attention.hf.probe import expanded
from drafters.base import BlockHead, Head, RatesDrafts
from drafters.loops.base import AnyLoop
from specdec.config import EngineConfig
from specdec.errors import InvalidInputError
from specdec.import_names import uncollected
from specdec.loading.assembly import Parts, choose_cascade, choose_prefix_caching
from specdec.loading.backends import (
    begin_kernels,
    check_backend_fits,
    expected_keys,
    make_backend,
    name_what_is_left_out,
    runs_evenly,
)
from specdec.loading.cache_format import kv_format, kv_layout, state_group
from specdec.loading.checkpoint import Checkpoint, parsed_once
from specdec.loading.cuda_graphs import loading_thread
from specdec.loading.heads import Draft, check_head_type, load_head, read_draft_vocab, split_draft
from specdec.loading.names import load_pair
from specdec.loading.progress import log
from specdec.loading.quantisation import Dtype
from specdec.loading.sizes import (
    Pools,
    Rows,
    batched_tokens,
    check_counts,
    check_sizes_fit,
    divide_cache,
    empty_pools,
    filled,
    num_drafts,
    scores_bytes,
    windowed_pools,
)
from specdec.loading.sizes import max_model_len as max_model_len_of
from specdec.loading.targets import Target, open_target
from specdec.loading.tokenizers import open_tokenizer, warn_of_another_vocabulary
from specdec.logits.extra import ChangedLogits
from specdec.logits.logprobs import Logprobs, prompt_rows
from specdec.options import LoadOptions
from specdec.rounds.buckets import loop_limits
from specdec.rounds.extras import MakeExtras, RoundExtra
from specdec.rounds.transfer import staging_bytes
from specdec.selftest.kept import fingerprint, self_test_of
from specdec.selftest.selftest import self_test_head
from specdec.user_warnings import busy_cores, warn_user
from specdec.values import without, wrong
from specdec.wrapped.group import Group
from specdec.wrapped.linears import why_plain
from specdec.wrapped.long_rope import find_long_rope
from specdec.wrapped.probing import TargetProbe, probe_target


def load_parts(
    target: Target,
    draft: Draft,
    options: LoadOptions,
    group: Group,
    more_extras: MakeExtras,
) -> Parts:
    """Load target and head, and settle every size, before memory is taken for any of them. All of a group call it.

    more_extras: makes the extras of rounds that extensions bring.

    Raises:
        ModelLoadError, UnsupportedModelError: the target; HeadLoadError, HeadMismatchError: the head;
        InvalidInputError: an option that does not fit these; CacheTooSmallError: no room for the caches.
    """
    check_counts(options, options.max_model_len)
    draft, lookup = split_draft(draft)
    options = replace(options, draft_vocab=read_draft_vocab(options.draft_vocab))
    if draft is not None:
        check_head_type(draft)
    with parsed_once(target, options.gguf_file):
        opened, pair = load_pair(target, draft, options.revision, lambda named: _open(named, options, group))
        (model, checkpoint) = opened
        draft = pair.draft
        with uncollected():  # a vocabulary is a hundred thousand objects more
            tokenizer = open_tokenizer(options.tokenizer, checkpoint)
    backend = make_backend(options.backend, model.device)
    if model.device.type == "cpu" and (busy := busy_cores(torch.get_num_threads())):
        warn_user(busy)
    # The layers of the model; the kernels they need start to be built.
    log.info("reading the model's layers")
    probed = probe_target(model)
    check_backend_fits(probed, backend)
    if backend.batch_invariant:
        probed = replace(probed, calls=expanded(probed.calls))
    keys = [call.attention_spec for call in probed.calls]
    begin_kernels(options.backend, model.device, keys, model.dtype, options.kv_cache_dtype)
    group.check_target(probed)
    name_what_is_left_out(probed)
    warn_of_another_vocabulary(tokenizer, probed.vocab_size)
    given = isinstance(target, PreTrainedModel)
    linears = why_plain(options.cpu_linears, model, given, group.size == 1, runs_evenly(backend))
    log.info("loading the head")
    with pair.explained():
        head = load_head(draft, checkpoint, probed, options, tokenizer, group)
    if backend.batch_invariant and head is not None and hasattr(head, "expand"):
        head.expand()
    parts = _sized(probed, head, checkpoint, tokenizer, backend, options, group, lookup, more_extras, linears)
    named = (target, draft or "", options.tokenizer or "")
    keeps = options.self_test != "quick" and group.size == 1 and all(isinstance(each, (str, Path)) for each in named)
    tests = self_test_of(options.self_test, fingerprint_of(parts, options) if keeps else None)
    if isinstance(draft, (str, Path)) and tests.error is None:
        self_test_head(head, model, tokenizer, parts.config.num_speculative_tokens)
    return replace(parts, self_test=tests)


_NOT_TESTED = ("self_test", "seed", "max_waiting_requests", "generation_config")
"""Load options on which no self-test depends."""


def fingerprint_of(parts: Parts, options: LoadOptions) -> str | None:
    """See `specdec.selftest.kept.fingerprint`; None with code of others: the checkpoint's or a registered backend's."""
    checkpoint = parts.checkpoint
    own = type(parts.backend).__module__.startswith("attention.") and not options.trust_remote_code
    if checkpoint is None or not own:
        return None
    name = checkpoint.gguf_file or "config.json"
    path = cached_file(checkpoint.path, name, local_files_only=True, revision=checkpoint.revision)
    if path is None:
        return None
    files = [file for file in Path(path).parent.glob("*") if file.is_file()]
    given = without(vars(options), _NOT_TESTED)
    # The size that memory decides differs a little from start to start, and no test reads that many tokens.
    room = parts.cache_tokens.bit_length()
    return fingerprint(parts.probed.model, parts.head, files, (path, given, room))


def _open(target: Target, options: LoadOptions, group: Group) -> tuple[PreTrainedModel, Checkpoint | None]:
    """The target and where it was read from; kernels and the compiler begin while its weights are read."""
    log.info("loading the target")

    def begin(config: Any, kind: Dtype, place: torch.device) -> None:
        own = getattr(config.get_text_config(), "max_position_embeddings", None)
        check_counts(options, options.max_model_len or own)
        kind = kind if isinstance(kind, torch.dtype) else config.dtype
        begin_kernels(options.backend, place, expected_keys(config), kind, options.kv_cache_dtype)
        if place.type == "cuda" and options.cuda_graphs and options.backend != "torch":
            loading_thread()

    return open_target(target, options, begin, group)


def _extras(
    probed: TargetProbe, states: Any, rows: Rows, options: LoadOptions, lookup: bool, greedy: bool
) -> Iterator[RoundExtra]:
    """The extras of rounds for this target and these drafts; each kind is imported where it is needed.

    greedy: whether requests with drafts by lookup must be greedy.

    Raises:
        InvalidInputError: the longest match of a lookup is shorter than its shortest.
    """
    if states is not None:
        from specdec.extras.recurrent_states import RecurrentStates

        yield RecurrentStates(states.rule)
    found = find_long_rope(probed.model)
    if found is not None and rows.max_model_len > found.rule.original:
        from specdec.extras.long_factors import LongFactors

        yield LongFactors(found.rule)
    if lookup:
        from specdec.extras.lookup_drafts import LookupDrafts

        if options.lookup_max < options.lookup_min:
            raise InvalidInputError(
                f"lookup_max={options.lookup_max}: allowed is lookup_min={options.lookup_min} or more, up to which "
                "tokens of a match are compared"
            )
        yield LookupDrafts(options.lookup_min, options.lookup_max, options.lookup_shared, greedy)


def _sized(
    probed: TargetProbe,
    head: Head | None,
    checkpoint: Checkpoint | None,
    tokenizer: Any,
    backend: AttentionBackend,
    options: LoadOptions,
    group: Group,
    lookup: bool,
    more_extras: MakeExtras,
    linears: str,
) -> Parts:
    """The sizes of an engine for these parts, and the features that are on. Raises where memory cannot hold them."""
    device = probed.model.device
    longest = max_model_len_of(options.max_model_len, probed.model)
    check_counts(options, longest)
    format = kv_format(checkpoint, probed, options)
    seqs = options.max_num_seqs
    k = num_drafts(options.num_speculative_tokens, head, lookup, probed.model)
    rows = Rows(k, longest, seqs, options.max_num_batched_tokens or batched_tokens(device, seqs, k), options.page_size)
    pools = empty_pools(probed, head, format, longest, options.hybrid_kv_cache)
    group_of_states = state_group(probed, rows, options.recurrent_state_dtype, backend.batch_invariant)
    states = 0 if group_of_states is None else group_of_states.num_bytes(probed.model.dtype)
    scores = scores_bytes(seqs * (rows.num_speculative_tokens + 1), probed.vocab_size)
    pools = divide_cache(options.kv_cache_tokens, device, pools, rows, options.gpu_memory_utilization, states, scores)
    pools = filled(pools, group.least([pool.tokens for pool in pools]))  # their schedules must be the same
    graphs = options.cuda_graphs is not False and isinstance(backend, GraphBackend)
    greedy = head is not None and graphs and options.sampling != "keyed"
    extras = tuple(_extras(probed, group_of_states, rows, options, lookup, greedy))
    extras += more_extras(group.size == 1, greedy)
    extras += (ChangedLogits(), Logprobs(prompt_rows(probed.vocab_size)))
    config = _config(rows, pools, extras, options, head)
    loop = chosen_loop(head, config, options, graphs, lookup)
    prefix_caching = choose_prefix_caching(loop, options.enable_prefix_caching, bool(probed.recurrent_calls))
    kept = options.enable_prefix_caching is True
    config = replace(config, enable_prefix_caching=prefix_caching == "on", keep_prefixes=kept)
    cascade = choose_cascade(backend, prefix_caching, options.cascade_attention)
    first, *others = pools
    pages = zip(config.windowed, others, strict=True)
    windowed = sum(near.num_pages * rows.page_size * pool.token_bytes for near, pool in pages)
    check_sizes_fit(config, device, first.token_bytes, staging_bytes(loop, config), windowed, states)
    return Parts(
        probed,
        head,
        checkpoint,
        tokenizer,
        backend,
        config,
        loop,
        format,
        kv_layout(options.kv_cache_layout, backend),
        linears,
        prefix_caching,
        cascade,
        first.tokens,
        first.bytes + windowed + states,
        group_of_states,
    )


def chosen_loop(
    head: Head | None, config: EngineConfig, options: LoadOptions, graphs: bool, lookup: bool
) -> AnyLoop | None:
    """The head's draft loop. Raises InvalidInputError: it or its rounds cannot end verifications by confidence."""
    limits = loop_limits(config)
    least = options.min_confidence
    if least is None:
        return None if head is None else head.draft_loop(limits)
    if not isinstance(head, RatesDrafts) or not head.has_confidence:
        raise wrong("min_confidence", least, "only DSpark heads with a confidence head have any; leave it out")
    for stands, reason in (
        (graphs, "rounds from CUDA graphs verify whole blocks, whatever is cut; give cuda_graphs=False"),
        (lookup, "drafts by lookup have no confidence; leave one of the two out"),
        (options.tensor_parallel_size > 1, "processes might end them at other drafts; give tensor_parallel_size=1"),
        (not limits.drafts, "num_speculative_tokens=0 leaves no drafts; leave one of the two out"),
    ):
        if stands:
            raise wrong("min_confidence", least, reason)
    return head.draft_loop(limits, least)


def _config(
    rows: Rows, pools: Pools, extras: tuple[RoundExtra, ...], options: LoadOptions, head: Head | None
) -> EngineConfig:
    """The configuration, prefix caching off: whether it can be on depends on the draft loop for these sizes."""
    return EngineConfig(
        **vars(rows),
        num_pages=-(-pools[0].tokens // rows.page_size) + 1,
        windowed=windowed_pools(pools, rows.page_size),
        seed=options.seed,
        draft_sampling=options.draft_sampling,
        sampling=options.sampling,
        max_num_prefill_tokens=options.max_num_prefill_tokens,
        extras=extras,
        max_waiting_requests=options.max_waiting_requests,
        block_size=head.block_size if isinstance(head, BlockHead) else 0,
    )
