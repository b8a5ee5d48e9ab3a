"""What a plan costs the host, in µs: an attention metadata builder from a KV spec and a device, and no engine.

The torch reference on a CPU, FlashInfer on a GPU; Llama-3.1-8B's attention, verifications of six tokens a row.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from attention.backends.base import AttentionBackend, Building
from attention.backends.reference import TorchBackend
from attention.batch.host import rows_batch
from attention.batch.metadata import single_batch_arena, stage
from attention.cache.kv_cache import CacheGroup
from attention.spec import AttentionSpec

SPEC = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim_k=128, head_dim_v=128, scale=128**-0.5)
TOKENS, PAGE_SIZE, REPEATS = 6, 16, 50


def backend_of(device: torch.device) -> AttentionBackend:
    """The device's attention backend."""
    if device.type == "cpu":
        return TorchBackend(device)
    from attention.backends.flashinfer.backend import FlashInferBackend

    return FlashInferBackend(device)


def seconds_per_plan(backend: AttentionBackend, rows: int, keys: int, device: torch.device) -> list[float]:
    """Seconds of each plan for `rows` rows of TOKENS tokens on top of `keys` keys each."""
    pages = -(-(keys + TOKENS) // PAGE_SIZE)
    group = CacheGroup("example", (SPEC,), num_pages=rows * pages + 1, page_size=PAGE_SIZE)
    builder = backend.builder(group, SPEC, torch.bfloat16)
    for build in builder.builds if isinstance(builder, Building) else ():
        build.wait()  # kernels that are compiled in the background: minutes, the first time

    block_table = 1 + np.arange(rows * pages, dtype=np.int32).reshape(rows, pages)
    batch = rows_batch(np.arange(rows + 1) * TOKENS, np.full(rows, keys), block_table, PAGE_SIZE)
    metadata = stage(batch, *single_batch_arena(rows, rows * TOKENS, pages, device))
    builder.build(metadata)
    seconds = []
    for _ in range(REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        builder.build(metadata)
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    """Print the median for some batches."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = backend_of(device)
    for rows, keys in ((1, 128), (8, 1024), (32, 2048)):
        seconds = seconds_per_plan(backend, rows, keys, device)
        print(f"{backend.name}: {rows} rows of {keys} keys: {statistics.median(seconds) * 1e6:.1f} µs a plan")


if __name__ == "__main__":
    main()
