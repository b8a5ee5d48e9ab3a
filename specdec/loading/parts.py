"""Builds the parts of an engine from a target, a draft and options: model, head, kernels and the sizes of caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from attention.backends.base import AttentionBackend, GraphBackend
from drafters.base import Head
from drafters.families import check_options
from specdec.config import EngineConfig
from specdec.loading.assembly import Parts, choose_cascade, choose_prefix_caching
from specdec.loading.backends import (
    begin_kernels,
    check_backend_fits,
    check_format_fits,
    expected_keys,
    kv_format,
    kv_layout,
    make_backend,
    name_what_is_left_out,
)
from specdec.loading.checkpoint import Checkpoint
from specdec.loading.groups import Division, Rows, TokenBytes, divide_cache, token_bytes
from specdec.loading.heads import load_head, reading_options, split_draft
from specdec.loading.memory import check_counts, check_page_size, check_sizes_fit, check_tables_fit, scores_bytes
from specdec.loading.objects import check_head_type
from specdec.loading.pairs import load_pair
from specdec.loading.progress import log
from specdec.loading.sizes import long_rope_extras, lookup_extras, num_drafts
from specdec.loading.sizes import max_model_len as max_model_len_of
from specdec.loading.targets import open_target
from specdec.loading.tokenizers import open_tokenizer, warn_of_another_vocabulary
from specdec.loading.warming import loading_thread
from specdec.logits.extra import ChangedLogits
from specdec.logits.logprobs import Logprobs, prompt_rows
from specdec.options import LoadOptions
from specdec.rounds.buckets import loop_limits
from specdec.rounds.extras import MakeExtras, RoundExtra, no_extras
from specdec.rounds.transfer import staging_bytes
from specdec.selftest.selftest import self_test_head
from specdec.user_warnings import busy_cores, warn_user
from specdec.wrapped.group import ALONE, Group
from specdec.wrapped.probing import TargetProbe, probe_target


def load_parts(
    target: str | Path | PreTrainedModel,
    draft: str | Path | Head | None,
    options: LoadOptions,
    group: Group = ALONE,
    more_extras: MakeExtras = no_extras,
) -> Parts:
    """Load target and head, and settle every size, before memory is taken for any of them. All of a group call it.

    more_extras: makes the extras of rounds that extensions bring.

    Raises:
        ModelLoadError, UnsupportedModelError: the target; HeadLoadError, HeadMismatchError: the head;
        InvalidInputError: an option that does not fit these; CacheTooSmallError: no room for the caches.
    """
    check_counts(options.max_num_seqs, options.max_num_batched_tokens, options.max_model_len)
    draft, lookup = split_draft(draft)
    vocabulary = None if options.draft_vocab is None else _draft_vocabulary()
    draft_vocab = vocabulary and vocabulary.read_draft_vocab(options.draft_vocab)
    if draft is not None:
        check_head_type(draft)
    opened, pair = load_pair(target, draft, options.revision, lambda named: _open(named, options, group))
    (model, checkpoint), draft = opened, pair.draft
    reading = reading_options(options)
    if draft is None:
        check_options(reading, None, "there is no draft head")
    if not isinstance(draft, (str, Path)) and vocabulary is not None:
        reason = "there is no draft head" if draft is None else "the head is loaded already (it has `draft_on`)"
        vocabulary.check_draft_vocab(draft_vocab, reason)
    tokenizer = open_tokenizer(options.tokenizer, checkpoint)
    backend = make_backend(options.backend, model.device)
    if model.device.type == "cpu" and (busy := busy_cores(torch.get_num_threads())):
        warn_user(busy)
    probed = _probe(model, backend, options)
    group.check_target(probed)
    name_what_is_left_out(probed)
    warn_of_another_vocabulary(tokenizer, probed.vocab_size)
    log.info("loading the head")
    with pair.explained():
        head = None if draft is None else load_head(draft, checkpoint, probed, reading)
    if head is not None and vocabulary is not None:
        vocabulary.draft_on(head, draft_vocab, probed, tokenizer, group)
    parts = _sized(probed, head, checkpoint, tokenizer, backend, options, group, lookup, more_extras)
    if isinstance(draft, (str, Path)):
        self_test_head(head, model, tokenizer, parts.config.num_speculative_tokens)
    return parts


def _draft_vocabulary() -> Any:
    from specdec.loading import draft_vocabulary

    return draft_vocabulary


def _open(
    target: str | Path | PreTrainedModel, options: LoadOptions, group: Group
) -> tuple[PreTrainedModel, Checkpoint | None]:
    """The target and where it was read from; kernels and the compiler begin while its weights are read."""
    log.info("loading the target")

    def begin(config: Any, kind: torch.dtype | str, place: torch.device) -> None:
        own = getattr(config.get_text_config(), "max_position_embeddings", None)
        check_page_size(options.page_size, options.max_model_len or own)
        kind = kind if isinstance(kind, torch.dtype) else config.dtype
        begin_kernels(options.backend, place, expected_keys(config), kind, options.kv_cache_dtype)
        if place.type == "cuda" and options.cuda_graphs and options.backend != "torch":
            loading_thread()

    return open_target(target, options, begin, group)


def _probe(model: PreTrainedModel, backend: AttentionBackend, options: LoadOptions) -> TargetProbe:
    """The layers of the model; the kernels they need start to be built."""
    log.info("reading the model's layers")
    probed = probe_target(model)
    check_backend_fits(probed, backend)
    keys = [call.attention_spec for call in probed.calls]
    begin_kernels(options.backend, model.device, keys, model.dtype, options.kv_cache_dtype)
    return probed


def _states(probed: TargetProbe, rows: Rows) -> tuple[int, tuple[RoundExtra, ...]]:
    """Bytes of the states of a target's recurrent layers, and their extras of rounds; 0 and () without any."""
    if not probed.recurrent_calls:
        return 0, ()
    from specdec.loading.states import state_bytes, state_extras

    return state_bytes(probed, rows), state_extras(probed, rows.num_speculative_tokens)


def _scales(
    checkpoint: Checkpoint | None, probed: TargetProbe, options: LoadOptions
) -> tuple[Sequence[tuple[float, float]] | None, str]:
    """The scales of an 8-bit KV cache and their origin: see `kv_scales.chosen_scales`."""
    if options.kv_cache_dtype != "fp8":
        return options.kv_cache_scales, ""
    from specdec.loading.kv_scales import chosen_scales

    return chosen_scales(checkpoint, probed, options.kv_cache_dtype, options.kv_cache_scales)


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
) -> Parts:
    """The sizes of an engine for these parts, and the features that are on. Raises where memory cannot hold them."""
    device, page_size = probed.model.device, options.page_size
    longest = max_model_len_of(options.max_model_len, probed.model)
    check_page_size(page_size, longest)
    check_tables_fit(options.max_num_seqs, longest)
    format = kv_format(options.kv_cache_dtype, *_scales(checkpoint, probed, options))
    check_format_fits(probed, format)
    k, seqs, most = options.num_speculative_tokens, options.max_num_seqs, options.max_num_batched_tokens
    rows = Rows(num_drafts(k, head, lookup), longest, seqs, most, page_size)
    sizes = token_bytes(probed, head, format, longest, options.hybrid_kv_cache)
    states, extras = _states(probed, rows)
    scores = scores_bytes(seqs * (rows.num_speculative_tokens + 1), probed.vocab_size)
    cache = divide_cache(options.kv_cache_tokens, device, sizes, rows, options.gpu_memory_utilization, states, scores)
    tokens, *others = group.least([cache.tokens, *cache.windowed])  # their schedules must be the same
    cache = Division(tokens, tuple(others))
    greedy = head is not None and options.cuda_graphs is not False and isinstance(backend, GraphBackend)
    extras += (*long_rope_extras(probed.model, longest), *(lookup_extras(options, greedy) if lookup else ()))
    extras += more_extras(group.size == 1, greedy)
    extras += (ChangedLogits(), Logprobs(prompt_rows(probed.vocab_size)))
    config = _config(rows, cache, sizes, extras, options)
    loop = None if head is None else head.draft_loop(loop_limits(config))
    prefix_caching = choose_prefix_caching(loop, options.enable_prefix_caching, bool(probed.recurrent_calls))
    kept = options.enable_prefix_caching is True
    config = replace(config, enable_prefix_caching=prefix_caching == "on", keep_prefixes=kept)
    cascade = choose_cascade(backend, prefix_caching, options.cascade_attention)
    windowed = sizes.of_pools(config.windowed, page_size)
    check_sizes_fit(config, device, sizes.first, staging_bytes(loop, config), windowed, states)
    return Parts(
        probed,
        head,
        checkpoint,
        tokenizer,
        backend,
        config,
        format,
        kv_layout(options.kv_cache_layout, backend),
        prefix_caching,
        cascade,
        cache.tokens,
        cache.tokens * sizes.first + windowed + states,
    )


def _config(
    rows: Rows, cache: Division, sizes: TokenBytes, extras: tuple[RoundExtra, ...], options: LoadOptions
) -> EngineConfig:
    """The configuration, prefix caching off: whether it can be on depends on the draft loop for these sizes."""
    return EngineConfig(
        **vars(rows),
        num_pages=-(-cache.tokens // rows.page_size) + 1,
        windowed=cache.pools(sizes, rows.page_size),
        seed=options.seed,
        draft_sampling=options.draft_sampling,
        max_num_prefill_tokens=options.max_num_prefill_tokens,
        extras=extras,
        max_waiting_requests=options.max_waiting_requests,
    )
