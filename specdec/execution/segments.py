"""SegmentedGraph: a launch as CUDA graphs of the parts between its attentions, which run outside the graphs. Other
calls that depend on the rows (by layers with recurrent states) are cut out in the same way.

Attention of a round with prompts has no fixed shape: its plan, its kernels and their grids depend on the rows. All the
rest depends on the number of tokens alone. So the launch is captured up to an attention, from there to the next one,
and so on; a replay runs the graphs in turn, and the attention between two of them is launched as in any other round, on
the batch as it is.

Source: vllm-project/vllm, "piecewise" CUDA graphs (vllm/compilation); here the launch is cut while it is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from attention.hf.custom_op import LayerAttend
from specdec.wrapped.group import ALONE, Group

T = TypeVar("T")

AttendInto = Callable[[int, Tensor, Tensor, Tensor, Tensor | None, Tensor], Tensor]
"""A `LayerAttend` with an output argument; its tensors may have padding after the tokens of its batch."""


class CutCalls(Protocol):
    """Calls of a launch, other than attention, that run outside the graphs. Implemented by `StateRunner`."""

    def blank(self) -> Any:
        """An implementation of the calls that returns zeros."""

    def noted(self, note: Callable[[str, int, tuple[Any, ...], Tensor], None]) -> Any:
        """An implementation that only passes each call to `note`: its name, number, inputs, and output tensor."""


@dataclass(frozen=True)
class Between:
    """The launches between two graphs: a batch's attention, and the function for its `CutCalls` if it has any."""

    attend: AttendInto
    serving: Any = None


Call = Callable[[Between], object]
"""Launches one attention, or one of the `CutCalls`, between two graphs, into the input of the next graph."""


class SegmentedGraph:
    """The graphs of one launch and the calls between them."""

    def __init__(self, graphs: list[torch.cuda.CUDAGraph], calls: Sequence[Call]) -> None:
        self._graphs = graphs
        self._calls = calls

    @property
    def num_graphs(self) -> int:
        """Number of graphs: the calls between them plus one."""
        return len(self._graphs)

    def replay(self, plan: Callable[[], Between]) -> None:
        """Run the launch again on the tokens of a batch; results of padding are noise.

        plan: makes the batch's attention; it is called when the first graph is launched, so that the device is at work.
        """
        self._graphs[0].replay()
        between = plan()
        for call, graph in zip(self._calls, self._graphs[1:], strict=True):
            call(between)
            graph.replay()


class _Cutter:
    """Captures on the capture stream, and begins a new graph at every attention."""

    def __init__(self, pool: Any, group: Group) -> None:
        self._pool = pool
        self._group = group
        self._open = False
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.calls: list[Call] = []

    def begin(self) -> None:
        self.graphs.append(torch.cuda.CUDAGraph())
        self._group.note_graph(self.graphs[-1])
        # thread_local: see `record` in capture.py.
        self.graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._open = True

    def end(self) -> None:
        """End the capture. Idempotent: an exception between two graphs is raised as it is."""
        if self._open:
            self._open = False
            self.graphs[-1].capture_end()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """A `LayerAttend` that attends nothing: the graph ends with its inputs, the next one begins with its output."""
        out = _output(query, value)
        self.end()
        q, k, v, to = map(unowned, (query, key, value, out))
        self.calls.append(lambda between: between.attend(layer, q, k, v, sinks, to))
        self.begin()
        return out

    def note(self, name: str, call: int, inputs: tuple[Any, ...], out: Tensor) -> None:
        """Cut at a call of `CutCalls`: the graph ends with its inputs, the next one begins with its output."""
        self.end()
        own, to = tuple(unowned(x) if isinstance(x, Tensor) else x for x in inputs), unowned(out)
        self.calls.append(lambda between: to.copy_(between.serving(name, call, *own)))
        self.begin()


def record_segments(
    launch: Callable[[LayerAttend, Any], T], pool: Any, group: Group = ALONE, others: CutCalls | None = None
) -> tuple[SegmentedGraph, T]:
    """Run `launch` once with an attention of zeros (load, allocate), then capture it into graphs that share `pool`.

    Nothing waits for the device, so it can be done between two rounds.

    group: the processes whose exchanges the graphs may hold. others: further calls of the launch that are cut out; the
        launch receives their implementation as its second argument, None without `others`.

    Returns:
        The graphs, and the result of the captured launch, into which each replay writes.
    """
    launch(_nothing, None if others is None else others.blank())
    # The stream on which torch captures all graphs. The allocator reuses free blocks of a pool only on the stream
    # that allocated them, so graphs share memory only if all are captured on it.
    if torch.cuda.graph.default_capture_stream is None:
        torch.cuda.graph.default_capture_stream = torch.cuda.Stream()
    stream = torch.cuda.graph.default_capture_stream
    cutter = _Cutter(pool, group)
    # The capture stream must see what was launched here before, such as the run that loads and allocates.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cutter.begin()
        try:
            result = launch(cutter.attend, None if others is None else others.noted(cutter.note))
        finally:
            cutter.end()
    return SegmentedGraph(cutter.graphs, cutter.calls), result


def _nothing(layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
    return _output(query, value).zero_()


def _output(query: Tensor, value: Tensor) -> Tensor:
    return query.new_empty(len(query), query.shape[1], value.shape[2])


class _Memory:
    """Device memory by its address, see https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""

    def __init__(self, x: Tensor) -> None:
        size = x.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(x.shape),
            "strides": tuple(stride * size for stride in x.stride()),
            "typestr": f"<i{size}",  # integers of the same size: it has no bfloat16
            "data": (x.data_ptr(), False),
            "version": 3,
        }


def unowned(x: Tensor) -> Tensor:
    """The same memory without keeping it: later parts of the graphs use it again, as they do in every replay."""
    if not x.is_cuda:
        return x
    return torch.as_tensor(_Memory(x), device=x.device).view(x.dtype)
