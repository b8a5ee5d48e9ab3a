"""How parameters, statistics and models are shown: in one line, and as a bar."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from attention.backends.limits import dtype_name
from specdec.values import ratio, short


def changed_fields(given: Any) -> str:
    """A dataclass with the fields that differ from their defaults: "SamplingParams(temperature=0.7)"."""
    each = ((f, getattr(given, f.name)) for f in fields(given))
    changed = [f"{f.name}={short(own)}" for f, own in each if type(own) is not type(f.default) or own != f.default]
    return f"{type(given).__name__}({', '.join(changed)})"


def tau_words(tau: float) -> str:
    """ "τ=3.95"; "no rounds" for NaN."""
    return f"τ={tau:.2f}" if tau == tau else "no rounds"


def model_line(model: Any) -> str:
    """A `SpeculativeModel` in a line; whatever state it is in, also after `close`."""
    named = getattr(model.checkpoint, "name", None) or model.hf_model.name_or_path or type(model.hf_model).__name__
    name = Path(str(named)).name if Path(str(named)).is_absolute() else str(named)
    stats = model.engine_stats
    config = model.config
    shown = [name, "closed"]
    if "engine" in vars(model):
        heads = [] if model.head is None else [type(model.head).__name__]
        drafts = " and ".join([*heads, *(e.drafts for e in config.extras if e.drafts)]) or "no head"
        device = f"{dtype_name(model.dtype)} on {model.device}"
        shown = [name, drafts, f"K={config.num_speculative_tokens}", device, model.backend_name]
    served = f"{tau_words(stats.tau)} in {stats.requests} requests" if stats.requests else "no requests yet"
    return f"SpeculativeModel({', '.join([*shown, served])})"


def with_bar(stream: Any, hidden: bool = False) -> Iterator[tuple[int, Any]]:
    """(index, Completion) of each of a `Stream` as it finishes, beside a bar of them with tokens a second and τ, unless
    that is hidden."""
    from tqdm.auto import tqdm

    tokens = 0
    verified = 0
    emitted = 0
    begin = time.perf_counter()
    with stream, tqdm(total=stream.num_requests, unit="completion", disable=hidden) as bar:
        for update in stream:
            tokens += len(update.token_ids)
            if update.completion is not None:
                pooled = update.completion.pooled
                verified = verified + pooled.rounds
                emitted = emitted + pooled.emitted
            rate = tokens / max(time.perf_counter() - begin, 1e-9)
            tau = tau_words(ratio(emitted, verified))
            bar.set_postfix_str(f"{tokens} tokens, {rate:.0f}/s, {tau}", refresh=False)
            bar.update(update.completion is not None)
            if update.completion is not None:
                yield update.index, update.completion
