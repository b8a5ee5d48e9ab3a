"""What capturing CUDA graphs cost, for `describe`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GraphReport:
    """What capturing cost.

    Attributes:
        graphs: number of graphs for the buckets' rounds; sampled_graphs: those that only rounds with sampled rows run,
        beside them; segment_graphs: those of rounds of any shape (more are captured when they are needed).
        rows: the buckets; seconds: compiling and capturing; bytes: memory reserved meanwhile;
        fused_groups: sibling projections that became one matmul; products: how matmul algorithms were chosen.
    """

    graphs: int
    sampled_graphs: int
    segment_graphs: int
    rows: tuple[int, ...]
    seconds: float
    bytes: int
    fused_groups: int
    products: str
