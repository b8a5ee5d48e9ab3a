"""AttentionSpec: what one attention layer needs of a kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TemperatureTuning:
    """A query at position p is multiplied by 1 + scale·log(1 + ⌊(p + 1) / floor⌋).

    Source: Nakanishi 2025, arXiv 2501.19399, in the form of transformers' modeling_llama4.py.

    Attributes:
        scale: 0 leaves every query as it is.
        floor: positions between two values of the factor.
    """

    scale: float
    floor: float


@dataclass(frozen=True)
class AttentionSpec:
    """What one attention layer needs of a kernel; layers with equal specs share one plan.

    Attributes:
        num_q_heads, num_kv_heads: Hq and Hkv; Hq is a multiple of Hkv.
        head_dim_k, head_dim_v: width of a query/key head and of a value head.
        scale: factor on q·k before softcap and softmax.
        window: number of visible positions including its own, or None for all
            (Hugging Face's convention; FlashInfer's `window_left` is `window - 1`).
        softcap: logits become softcap·tanh(logits/softcap), or None.
        has_sinks: a learned logit per query head joins the softmax's denominator.
        value_in_key: a value is the first head_dim_v columns of its key (MLA, see attention/hf/mla.py):
            the cache keeps keys only.
        chunk_size: positions per chunk of local attention, whose queries see the keys of their own chunk only; or None.
            A backend's kernel never sees it: `GroupRunner` gives its builder virtual rows that are in one chunk each.
        temperature: the factor by position that `GroupRunner` multiplies queries with before a backend, or None.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    value_in_key: bool = False
    chunk_size: int | None = None
    temperature: TemperatureTuning | None = None
