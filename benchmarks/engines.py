"""Engines that benchmarks measure: sizes for batches of so many rows, and where plans are made from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attention.backends.base import GraphBackend
from attention.batch.host import HostBatch
from attention.batch.metadata import CommonAttentionMetadata
from attention.cache.kv_cache import CacheGroup, KVFormat
from attention.spec import AttentionSpec
from benchmarks.shapes import Pair
from benchmarks.synthetic import Tokenizer
from specdec.config import EngineConfig
from specdec.loading.assembly import Parts
from specdec.loading.backends import make_backend
from specdec.loading.states import state_extras
from specdec.model import SpeculativeModel
from specdec.options import LoadOptions
from specdec.wrapped.probing import probe_target


class DevicePlanned:
    """A builder that reads the lengths back from the device before it plans, as engines that plan from there must."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self._lengths: tuple[torch.Tensor, ...] = ()

    def build(self, metadata: CommonAttentionMetadata) -> Any:
        """Read qo_indptr, page_indptr and last_page_len back, then plan."""
        self._lengths = (metadata.query_start_loc, metadata.page_indptr, metadata.last_page_len)
        self._read_back()
        return self._builder.build(metadata)

    def replan(self, host: HostBatch) -> None:
        """As `build`, for the same device arrays."""
        self._read_back()
        self._builder.replan(host)

    def _read_back(self) -> None:
        for tensor in self._lengths:
            tensor.cpu()


class DevicePlannedBackend:
    """FlashInfer with every plan made from device tensors: the other configuration of the ablation."""

    name = "flashinfer, planned from device tensors"

    def __init__(self, backend: GraphBackend) -> None:
        self.run = backend.run
        self.batch_invariant = backend.batch_invariant
        self.route = backend.route
        self._backend = backend

    def builder(self, group: CacheGroup, key: AttentionSpec, dtype: torch.dtype) -> DevicePlanned:
        """See GraphBackend."""
        return DevicePlanned(self._backend.builder(group, key, dtype))

    def fixed_builder(
        self,
        group: CacheGroup,
        key: AttentionSpec,
        dtype: torch.dtype,
        rows: int,
        query_len: int,
        beside: object = None,
        tokens: int | None = None,
    ) -> DevicePlanned:
        """See GraphBackend; nothing is shared: every plan reads its own lengths back."""
        return DevicePlanned(self._backend.fixed_builder(group, key, dtype, rows, query_len, tokens=tokens))


def engine(pair: Pair, config: EngineConfig, name: str, plan_from: str) -> SpeculativeModel:
    """The public model over a pair, from CUDA graphs where the backend has them.

    They are required, since a step without them is another measurement; but of a target with recurrent layers: where
    these have no kernels that a graph can hold, a warning says so and rounds run without (`SpeculativeModel.graphs`).
    """
    probed, device = probe_target(pair.target), pair.target.device
    config = replace(config, extras=state_extras(probed, config.num_speculative_tokens))
    backend: Any = make_backend(name, device)
    if plan_from == "device":
        backend = DevicePlannedBackend(backend)
    head = pair.head if config.num_speculative_tokens else None
    graphs: Any = True if isinstance(backend, GraphBackend) and not config.extras else "auto"
    caching = "on" if config.enable_prefix_caching else "off"
    fixed = (KVFormat(), "NHD", caching, "off", config.num_pages * config.page_size, 0)
    return SpeculativeModel(
        Parts(probed, head, None, Tokenizer(), backend, config, *fixed), LoadOptions(cuda_graphs=graphs)
    )


def sizes_of(
    drafts: int, batches: list[int], prompt: int, new_tokens: int, long: int | None, page_size: int = 16
) -> EngineConfig:
    """An engine for batches of so many rows: pages for `prompt` and `new_tokens` tokens a row, and for a long one.

    Prompts are read in as few rounds as go, beside rows that decode too: else the first rows of a large batch end
    before the last ones have begun.

    >>> [sizes_of(5, [8, 16], 512, 256, long).num_pages for long in (None, 65_536)]
    [785, 4849]
    """
    short, longest = prompt + new_tokens + 16, max(prompt, long or 0) + new_tokens + 16
    rows = max(batches)
    pages = (rows - 1) * -(-short // page_size) + -(-longest // page_size) + 1
    tokens = max(8192, rows * (drafts + 1))
    return EngineConfig(drafts, longest, rows, tokens, page_size, pages, max_num_prefill_tokens=tokens)
