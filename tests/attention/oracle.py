"""What attention over a paged cache must give, from dense keys and values in float32, one row at a time.

Shares nothing with attention/backends/reference.py: no gather, no block table and no padding in the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from attention.backends.base import AttentionBackend
from attention.batch.metadata import CommonAttentionMetadata, single_batch_arena, stage
from attention.cache.kv_cache import FP8, CacheGroup, KVFormat, KVLayout, LayerKV
from attention.runner import GroupRunner
from attention.spec import AttentionSpec
from tests.attention.batches import Batch

MODEL_FORMAT = KVFormat()
GARBAGE = 50.0
"""Standard deviation of what lies in pages and slots that no row of the batch owns."""


@dataclass(frozen=True)
class Variant:
    """One layer, and how its cache is stored."""

    key: AttentionSpec
    page_size: int = 16
    layout: KVLayout = "NHD"
    format: KVFormat = MODEL_FORMAT

    def group(self, num_pages: int) -> CacheGroup:
        """The layer's cache group."""
        return CacheGroup("test", (self.key,), num_pages, self.page_size, self.layout, self.format)


def expected_row(
    key: AttentionSpec, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """query [q, Hq, Dk] of a row's last tokens, keys [S, Hkv, Dk], values [S, Hkv, Dv] -> [q, Hq, Dv] float32."""
    group = key.num_q_heads // key.num_kv_heads
    q = query.float().transpose(0, 1)  # [Hq, q, Dk]
    k, v = (x.float().transpose(0, 1).repeat_interleave(group, 0) for x in (keys, values))  # [Hq, S, D]
    at = torch.arange(len(keys), device=query.device)
    place = at[len(keys) - len(query) :, None]
    visible = at <= place  # [q, S]
    if key.window is not None:
        visible &= place - at < key.window
    if key.softcap is None and sinks is None and key.alibi is None:
        return F.scaled_dot_product_attention(q, k, v, visible, scale=key.scale).transpose(0, 1)
    scores = torch.einsum("hqd,hsd->hqs", q, k) * key.scale
    if key.softcap is not None:
        scores = (scores / key.softcap).tanh() * key.softcap
    if key.alibi is not None:
        slopes = torch.tensor(key.alibi, device=query.device)
        scores = scores + slopes[:, None, None] * (at - place)
    weights = scores.where(visible, -torch.inf)
    total = weights.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float()[:, None, None])
    return torch.einsum("hqs,hsd->qhd", (weights - total).exp(), v)


class Rig:
    """One batch over one layer: dense states of every row, and the same in the pages of a runner."""

    def __init__(self, variant: Variant, batch: Batch, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.variant, self.batch, self.dtype, self.device = variant, batch, dtype, device
        self.key = key = variant.key
        self._generator = torch.Generator(device).manual_seed(seed)
        self.host = batch.host(variant.page_size, seed)
        self.rows = [
            (self._random(q, key.num_q_heads, key.head_dim_k), *self._keys_and_values(s))
            for q, s in zip(batch.query_lens, batch.seq_lens, strict=True)
        ]
        self.sinks = self._random(key.num_q_heads) if key.has_sinks else None

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.device).to(self.dtype)

    def _keys_and_values(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        key = self.key
        keys = self._random(length, key.num_kv_heads, key.head_dim_k)
        if key.value_in_key:
            return keys, keys[..., : key.head_dim_v]
        return keys, self._random(length, key.num_kv_heads, key.head_dim_v)

    def runner(self, backend: AttentionBackend) -> GroupRunner:
        """A runner whose pages hold the keys that were there before the batch, and garbage elsewhere."""
        num_pages = self.batch.num_pages(self.variant.page_size)
        runner = GroupRunner(backend, self.variant.group(num_pages), self.dtype, self.device)
        (layer,) = runner.layers
        for pages in (layer.keys,) if self.key.value_in_key else (layer.keys, layer.values):
            noise = torch.randn(pages.shape, generator=self._generator, device=self.device) * GARBAGE
            pages.copy_(noise.clamp(-400, 400).to(pages.dtype))
            pages[0] = 0
        self.store(layer, self.batch.computed)
        return runner

    def store(self, layer: LayerKV, lengths: tuple[int, ...]) -> None:
        """Write the first keys and values of every row, slot by slot of its own pages."""
        size = self.variant.page_size
        for row, length in enumerate(lengths):
            at = np.arange(length)
            page = torch.from_numpy(self.host.block_table[row, at // size].astype(np.int64)).to(self.device)
            slot = torch.from_numpy(at % size).to(self.device)
            _, keys, values = self.rows[row]
            sides = [(layer.keys, keys, layer.key_scale), (layer.values, values, layer.value_scale)]
            for pages, states, scale in sides[:1] if self.key.value_in_key else sides:
                by_slot = pages if self.variant.layout == "NHD" else pages.transpose(1, 2)
                by_slot.view(_bits(pages.dtype))[page, slot] = stored(states[:length], pages.dtype, scale).view(
                    _bits(pages.dtype)
                )

    def new_states(self) -> list[torch.Tensor]:
        """query [T, Hq, Dk], key [T, Hkv, Dk] and value [T, Hkv, Dv] of the batch's tokens."""
        lens = self.batch.query_lens
        return [torch.cat([row[i][-q:] for row, q in zip(self.rows, lens, strict=True)]) for i in range(3)]

    def metadata(self) -> CommonAttentionMetadata:
        """The batch on the device."""
        arena, bucket = single_batch_arena(
            self.host.num_reqs, self.host.num_tokens, self.host.block_table.shape[1], self.device
        )
        return stage(self.host, arena, bucket)

    def attended(self, runner: GroupRunner, fixed: bool = False) -> torch.Tensor:
        """[T, Hq, Dv] by the backend, planned as any batch or as one of a fixed shape."""
        metadata = self.metadata()
        planner: Any = runner
        if fixed:
            planner = runner.fixed_planner(self.host.num_reqs, self.batch.query_lens[0])
        return runner.attend(planner.plan(metadata), 0, *self.new_states(), self.sinks)

    def expected(self) -> list[torch.Tensor]:
        """[q, Hq, Dv] float32 of each row."""
        scales = self.variant.format.of_layer(0)
        dtype = self.variant.format.dtype_for(self.dtype)

        def read(states: torch.Tensor, scale: float) -> torch.Tensor:
            return stored(states, dtype, scale).float() * scale

        return [expected_row(self.key, q, read(k, scales[0]), read(v, scales[1]), self.sinks) for q, k, v in self.rows]

    def errors(self, out: torch.Tensor) -> tuple[float, float]:
        """Relative error of the batch, and of its worst row (norm of the difference over norm of what is right)."""
        right, ours = self.expected(), out.float().split(list(self.batch.query_lens))
        of_rows = [_relative(a, b) for a, b in zip(ours, right, strict=True)]
        return _relative(torch.cat(ours), torch.cat(right)), max(of_rows)

    def assert_written(self, runner: GroupRunner) -> None:
        """Every row's keys and values are in its own pages, to the bit."""
        (layer,) = runner.layers
        before = [pages.clone() for pages in (layer.keys, layer.values)]
        self.store(layer, self.batch.seq_lens)
        for pages, old in zip((layer.keys, layer.values), before, strict=True):
            assert torch.equal(pages.view(_bits(pages.dtype)), old.view(_bits(pages.dtype)))


def stored(states: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """What a cache of `dtype` holds of `states`."""
    if dtype != FP8:
        return states.to(dtype)
    return (states.float() / scale).clamp(-448, 448).to(FP8)


def _bits(dtype: torch.dtype) -> torch.dtype:
    """A dtype of the same size that torch can index."""
    return torch.uint8 if dtype == FP8 else dtype


def _relative(out: torch.Tensor, right: torch.Tensor) -> float:
    return float((out.double() - right.double()).norm() / right.double().norm())
