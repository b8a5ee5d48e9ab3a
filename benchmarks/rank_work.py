"""What a round of a divided target reads on each rank, and what its exchanges between ranks take alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from attention.cache.kv_cache import bytes_per_token
from benchmarks.shapes import COPY_BYTES_PER_S, MATMUL_FLOPS
from drafters.mtp.head import MtpHead
from specdec.extensions.parallel.collectives import Collectives
from specdec.extensions.parallel.shares import DividedRows

_REPLAYS = 20


def floor_ms(model: Any, rows: int, drafts: int, context: float) -> dict[str, float]:
    """The least time of a round on this rank: its weights and keys at the copy rate, or its matmuls' operations.

    Every draft is a pass of the head, which each rank has whole. Routers are taken to choose evenly.

    Args:
        model: a SpeculativeModel. context: keys a row.
    """
    tokens, target, head = rows * (drafts + 1), model.hf_model, model.head if drafts else None
    dense, chosen, routed = _weights(target, tokens)
    lm_head = target.get_output_embeddings().weight.numel() if isinstance(head, MtpHead) else 0
    of_head, head_chosen, head_routed = _weights(head, rows) if head is not None else (0.0, 0.0, 0.0)
    runners = [runner for group in model.runners[:1] for runner in group.runners]
    keys = sum(bytes_per_token(runner.group.attention_specs, model.dtype) for runner in runners)
    if head is not None:
        keys += drafts * bytes_per_token(head.attention_specs, model.dtype)
    size = model.dtype.itemsize
    read = size * (dense + chosen + drafts * (of_head + lm_head + head_chosen)) + rows * context * keys
    operations = 2 * ((dense + routed) * tokens + (of_head + lm_head + head_routed) * rows * drafts)
    return {"floor_ms": 1e3 * max(read / COPY_BYTES_PER_S, operations / MATMUL_FLOPS), "floor_bytes": float(read)}


def _weights(module: Any, tokens: int) -> tuple[float, float, float]:
    """Matmul weights that all tokens read, those of experts that `tokens` tokens choose, and those that one uses."""
    dense = chosen = routed = 0.0
    for each in module.modules():
        if isinstance(each, DividedRows):
            dense += each.count * each.in_features
        elif isinstance(each, nn.Linear):
            dense += each.weight.numel()
        elif hasattr(each, "num_experts") and hasattr(each, "has_gate"):
            count, size = each.num_experts, sum(p.numel() for p in each.parameters() if p.dim() == 3)
            used = min(_experts_a_token(module), count)
            chosen += size * (1 - (1 - used / count) ** tokens)
            routed += size * used / count
    return dense, chosen, routed


def _experts_a_token(module: Any) -> int:
    own = next((m for m in module.modules() if hasattr(getattr(m, "config", None), "num_experts_per_tok")), None)
    found: int = own.config.num_experts_per_tok if own is not None else 1
    return found


def exchanges_ms(engine: Any, tokens: int, rows: int) -> dict[str, Any]:
    """Milliseconds of a round's exchanges alone, on all ranks: `LeadingEngine.run("benchmarks.rank_work:…")`.

    Two sums a layer, behind attention and behind the feed-forward part (compiled code makes one of those of experts and
    shared experts, see `specdec.extensions.parallel.shares`), one after the other in a CUDA graph, by what the engine
    uses and by the process group alone (NCCL); one gather of logits; and the broadcasts of drafts and results.

    Args:
        tokens: of the verification. rows: whose logits are gathered, and whose ids are sent.
    """
    target, collectives = engine.target.hf_model, engine.ranks.collectives
    sums = 2 * target.config.get_text_config().num_hidden_layers
    x = torch.randn(tokens, target.config.get_text_config().hidden_size, device=target.device, dtype=target.dtype)
    logits = torch.randn(tokens, target.get_output_embeddings().count, device=target.device, dtype=target.dtype)
    ids = torch.zeros(rows, 8, dtype=torch.int64, device=target.device)
    found: dict[str, Any] = {"sums": sums}
    found["sums_ms"] = _timed(lambda: [collectives.sum(x) for _ in range(sums)])
    found["sums_by_group_ms"] = _timed(lambda: [Collectives.sum(collectives, x) for _ in range(sums)])
    found["gather_ms"] = _timed(lambda: collectives.gather(logits))
    sent = 2 if engine.config.num_speculative_tokens else 1
    found["broadcasts_ms"] = _timed(lambda: [collectives.from_first(ids) for _ in range(sent)])
    return found


def _timed(launch: Callable[[], object]) -> float:
    """Milliseconds of a launch: a CUDA graph's replay, or on the CPU a call."""
    if not torch.cuda.is_available():
        launch()
        started = time.perf_counter()
        launch()
        return 1e3 * (time.perf_counter() - started)
    launch()
    torch.cuda.synchronize()
    graph, start, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        launch()
    for _ in range(3):
        graph.replay()
    start.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / _REPLAYS
