"""How parameters, completions, statistics and models are shown: in one line, as HTML in notebooks, and as a bar."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

from attention.backends.limits import dtype_name
from specdec.values import ratio, short

_MOST_LETTERS = 60


def changed_fields(given: Any) -> str:
    """A dataclass with the fields that differ from their defaults: "SamplingParams(temperature=0.7)"."""
    each = ((f, getattr(given, f.name)) for f in fields(given))
    changed = [f"{f.name}={short(own)}" for f, own in each if type(own) is not type(f.default) or own != f.default]
    return f"{type(given).__name__}({', '.join(changed)})"


def tau_words(tau: float) -> str:
    """ "τ=3.95"; "no rounds" for NaN."""
    return f"τ={tau:.2f}" if tau == tau else "no rounds"


def completion_line(text: str, num_tokens: int, reason: str, tau: float) -> str:
    """The representation of a completion."""
    plain = " ".join(text.split())
    shown = plain if len(plain) <= _MOST_LETTERS else f"{plain[: _MOST_LETTERS - 1]}…"
    return f"Completion({shown!r}, {num_tokens} tokens, {reason}, {tau_words(tau)})"


def html_table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    """A table of names and values, for a notebook; `title` and all cells are text."""
    cells = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left;white-space:pre-wrap">'
        f"{escape(value)}</td></tr>"
        for name, value in rows
    )
    return f"<table><caption>{escape(title)}</caption>{cells}</table>"


def completion_html(completion: Any) -> str:
    """A `Completion` as a table: its text, how it ended, acceptance and times."""
    stats = completion.stats
    pooled = completion.pooled
    per_second = (stats.new_tokens - 1) / stats.decode_s if stats.decode_s > 0 and stats.new_tokens > 1 else None
    rows = [
        ("text", completion.text),
        ("ended", f"{completion.finish_reason}{' by max_model_len' if completion.truncated_by else ''}"),
        ("tokens", f"{stats.prompt_tokens} of the prompt, {stats.new_tokens} new"),
        (
            "acceptance",
            f"{tau_words(pooled.tau)}, {pooled.rounds} rounds, {pooled.accepted} of {pooled.drafted} drafts",
        ),
        ("seconds", f"{stats.queue_s:.2f} waiting, {stats.prefill_s:.2f} prompt, {stats.decode_s:.2f} decoding"),
    ]
    return html_table("Completion", rows if per_second is None else [*rows, ("tokens/s", f"{per_second:.1f}")])


def model_line(model: Any) -> str:
    """A `SpeculativeModel` in a line."""
    return f"SpeculativeModel({', '.join(value for _, value in _model_rows(model)[:6])})"


def model_html(model: Any) -> str:
    """A `SpeculativeModel` as a table."""
    return html_table("SpeculativeModel", _model_rows(model))


def _model_rows(model: Any) -> list[tuple[str, str]]:
    """What it is, in the order of its line and more; whatever state it is in, also after `close`."""
    named = getattr(model.checkpoint, "name", None) or model.hf_model.name_or_path or type(model.hf_model).__name__
    name = Path(str(named)).name if Path(str(named)).is_absolute() else str(named)
    device = f"{dtype_name(model.dtype)} on {model.device}"
    stats = model.engine_stats
    config = model.config
    served = ("served", f"{tau_words(stats.tau)} in {stats.requests} requests" if stats.requests else "no requests yet")
    if "engine" not in vars(model):
        return [("target", name), ("state", "closed"), served]
    heads = [] if model.head is None else [type(model.head).__name__]
    return [
        ("target", name),
        ("head", " and ".join([*heads, *(e.drafts for e in config.extras if e.drafts)]) or "no head"),
        ("drafts", f"K={config.num_speculative_tokens}"),
        ("runs as", device),
        ("attention", model.backend_name),
        served,
        ("CUDA graphs", model.graphs),
        ("sizes", f"{config.max_num_seqs} requests at once, of up to {config.max_model_len:,} tokens"),
        ("prefix cache", model.prefix_caching),
        ("new tokens", f"{stats.new_tokens:,}"),
    ]


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
