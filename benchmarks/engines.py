"""Engines that benchmarks measure, and their sizes for batches of so many rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attention.backends.base import GraphBackend
from attention.cache.kv_cache import KVFormat
from benchmarks.shapes import Pair
from benchmarks.synthetic import Tokenizer
from specdec.config import EngineConfig
from specdec.loading.assembly import Parts
from specdec.loading.backends import make_backend
from specdec.loading.states import state_extras
from specdec.model import SpeculativeModel
from specdec.options import LoadOptions
from specdec.wrapped.probing import probe_target


def engine(pair: Pair, config: EngineConfig, name: str) -> SpeculativeModel:
    """The public model over a pair, from CUDA graphs where the backend has them.

    They are required, since a step without them is another measurement; but of a target with recurrent layers: where
    these have no kernels that a graph can hold, a warning says so and rounds run without (`SpeculativeModel.graphs`).
    """
    probed, device = probe_target(pair.target), pair.target.device
    config = replace(config, extras=state_extras(probed, config.num_speculative_tokens))
    backend: Any = make_backend(name, device)
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
