"""A launch with attention in it as CUDA graphs of what lies between the attentions.

Attention of a round with prompts has no fixed shape: its plan, its kernels and their grids depend on the rows. All the
rest depends on the number of tokens alone. So the launch is captured up to an attention, from there to the next one,
and so on; a replay runs the graphs in turn, and the attention between two of them is launched as in any other round, on
the batch as it is.

Source: vllm-project/vllm, "piecewise" CUDA graphs (vllm/compilation); here the launch is cut while it is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from attention.hf.custom_op import LayerAttend

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionCall:
    """One attention between two graphs: see `LayerAttend`. out [T, Hq, Dv] is what the next graph reads."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sinks: torch.Tensor | None
    out: torch.Tensor


class SegmentedGraph:
    """The graphs of one launch and the attentions between them."""

    def __init__(self, graphs: list[torch.cuda.CUDAGraph], calls: list[AttentionCall]) -> None:
        self._graphs = graphs
        self._calls = calls

    @property
    def num_graphs(self) -> int:
        """One more than there are attentions."""
        return len(self._graphs)

    def replay(self, attend: LayerAttend, num_tokens: int) -> None:
        """Run the launch again on the first num_tokens tokens; what it gives for the others is noise."""
        for graph, call in zip(self._graphs, self._calls, strict=False):
            graph.replay()
            query, key, value = call.query[:num_tokens], call.key[:num_tokens], call.value[:num_tokens]
            call.out[:num_tokens].copy_(attend(call.layer, query, key, value, call.sinks))
        self._graphs[-1].replay()


class _Cutter:
    """Captures on a stream of its own, and begins a new graph at every attention."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._open = False
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.calls: list[AttentionCall] = []

    def begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        self.graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._open = True

    def end(self) -> None:
        """Idempotent: what interrupts a capture between two graphs, or keeps one from beginning, is what is raised."""
        if self._open:
            self._open = False
            self.graphs[-1].capture_end()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """A `LayerAttend` that attends nothing: the graph ends with its inputs, the next one begins with its output."""
        out = _output(query, value)
        self.end()
        self.calls.append(AttentionCall(layer, unowned(query), unowned(key), unowned(value), sinks, unowned(out)))
        self.begin()
        return out


def record_segments(launch: Callable[[LayerAttend], T], pool: Any) -> tuple[SegmentedGraph, T]:
    """Run `launch` once with an attention of zeros (load, allocate), then capture it into graphs that share `pool`.

    Nothing waits for the device, so it can be done between two rounds.

    Returns:
        The graphs, and what the captured launch returned: where each replay writes its result.
    """
    launch(_nothing)
    stream, cutter = _capture_stream(), _Cutter(pool)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cutter.begin()
        try:
            result = launch(cutter.attend)
        finally:
            cutter.end()
    return SegmentedGraph(cutter.graphs, cutter.calls), result


def _capture_stream() -> torch.cuda.Stream:
    """The one that torch captures all graphs on: what is free in a pool is used again only on its own stream."""
    if torch.cuda.graph.default_capture_stream is None:
        torch.cuda.graph.default_capture_stream = torch.cuda.Stream()
    return torch.cuda.graph.default_capture_stream


def _nothing(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    return _output(query, value).zero_()


def _output(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query.new_empty(len(query), query.shape[1], value.shape[2])


class _Memory:
    """Device memory by its address, see https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""

    def __init__(self, x: torch.Tensor) -> None:
        size = x.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(x.shape),
            "strides": tuple(stride * size for stride in x.stride()),
            "typestr": f"<i{size}",  # integers of the same size: it has no bfloat16
            "data": (x.data_ptr(), False),
            "version": 3,
        }


def unowned(x: torch.Tensor) -> torch.Tensor:
    """The same memory without keeping it: later parts of the graphs use it again, as they do in every replay."""
    if not x.is_cuda:
        return x
    return torch.as_tensor(_Memory(x), device=x.device).view(x.dtype)
