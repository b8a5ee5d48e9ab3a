"""Recorded steps: a forward of few tokens on a CPU as one flat function of its tensors.

A step of few tokens spends a quarter of its time on a CPU in the Python of the model's modules. A recording calls the
same operators, in the same order, without them. It holds for one shape, and only where Python decided nothing by a
tensor's values: a forward that reads one (`item`, `nonzero`, `if tensor`) is not recorded. The tensors that operators
read besides the inputs (weights, buffers) are read where they were: new values in place count, other tensors do not.
"""

from __future__ import annotations

import operator
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import PreTrainedModel

from attention.hf.custom_op import LayerAttend
from attention.hf.gate import gate_of
from specdec.ops.packed_weight import Matrix
from specdec.values import Function
from specdec.wrapped.alterations import unseen_state
from specdec.wrapped.changes import WeightVersions

MOST_TOKENS = 64
"""Of a step that is recorded. The longer a step, the less of it is Python, and the more lengths there are."""
_LIVE_STEPS = 2
"""Steps of a shape before it is recorded, which takes as long as three."""
_MOST_SHAPES = 64
_ATEN = torch.ops.aten
_BY_VALUE = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded
"""Operators whose result the host reads, whose shape depends on values, or that draw random numbers."""
_DIRECT: dict[OpOverload, Function] = {
    _ATEN.add.Tensor: torch.add,
    _ATEN.cat.default: torch.cat,
    _ATEN.mean.dim: torch.mean,
    _ATEN.mul.Tensor: torch.mul,
    _ATEN.neg.default: torch.neg,
    _ATEN.pow.Tensor_Scalar: torch.pow,
    _ATEN.rsqrt.default: torch.rsqrt,
    _ATEN.select.int: torch.select,
    _ATEN.split_with_sizes.default: torch.split_with_sizes,
    _ATEN.transpose.int: torch.transpose,
    _ATEN.unsqueeze.default: torch.unsqueeze,
    _ATEN.view.default: Tensor.view,
}
"""Functions that take an operator's arguments as they are, and call it a microsecond sooner."""

_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")

Forward = Callable[[LayerAttend], Tensor]
"""A forward over given attention."""
Recording = Callable[..., Tensor]
"""(attention, *inputs) -> the output of the recorded forward for these inputs."""


class NotRecordableError(Exception):
    """A forward whose Python depends on values; the message has the operator."""


class _Recorder(TorchDispatchMode):
    """Writes down the operators that run inside of it, as a graph of torch.fx.

    Attributes:
        graph: calls of operators and of attention, in order. tensors: by name, those that it reads besides the inputs.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.tensors = dict[str, Tensor]()
        self._attention = self.graph.placeholder("attend")
        self._nodes = {id(tensor): self.graph.placeholder(f"i{n}") for n, tensor in enumerate(inputs)}
        self._held = list(inputs)  # so that no id is that of two tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(tag in func.tags for tag in _BY_VALUE) and not (func is _ATEN.index.Tensor and _has_no_mask(args[1])):
            raise NotRecordableError(str(func))
        found = func(*args, **kwargs or {})
        self._add(_DIRECT.get(func, func), args, kwargs or {}, found)
        return found

    def attending(self, attend: LayerAttend) -> LayerAttend:
        """Attention that is recorded as one call, whatever it does."""

        def attended(layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
            with _disable_current_modes():
                found = attend(layer, query, key, value, sinks)
            self._add(_attended, (self._attention, layer, query, key, value, sinks), {}, found)
            return found

        return attended

    def function(self, output: Tensor) -> Recording:
        """The function of what was recorded. Raises NotRecordableError: no operator made the output."""
        result = self._nodes.get(id(output))
        if result is None or result.op != "call_function":
            raise NotRecordableError("the output is no operator's")
        self.graph.output(result)
        self.graph.on_generate_code(lambda _: _in_few_names)
        made = fx.GraphModule(self.tensors, self.graph)
        for name in self.tensors:
            delattr(made, name)  # a module refers to itself: it would keep them until the next collection
        return partial(type(made).forward, SimpleNamespace(**self.tensors))

    def _add(self, function: Function, args: Any, kwargs: Any, found: Any) -> None:
        args, kwargs = fx.node.map_aggregate((args, kwargs), self._given)
        self._made(self.graph.call_function(function, args, kwargs), found)

    def _made(self, node: fx.Node, found: Any) -> None:
        """Remember which node makes a result, or each of several."""
        if isinstance(found, list | tuple):
            for place, each in enumerate(found):
                self._made(self.graph.call_function(operator.getitem, (node, place)), each)
        elif isinstance(found, Tensor) and id(found) not in self._nodes:
            self._nodes[id(found)] = node
            self._held.append(found)

    def _given(self, value: Any) -> Any:
        """What stands for an argument; a tensor that no operator made stays as it is."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            name = f"c{len(self._held)}"
            self.tensors[name] = value
            self._made(self.graph.get_attr(name), value)
        return self._nodes[id(value)]


def _in_few_names(body: list[str]) -> list[str]:
    """Generated lines in which the names of values that are gone are used again.

    torch.fx gives each value a name of its own. A frame of 2,000 names fills Python's memory for frames, so that each
    call from it would get more from the kernel, and give it back.
    """
    lines = list[str]()
    named = dict[str, str]()
    free = list[str]()
    for line in "".join(body).splitlines():
        made, is_made, rest = line.partition(" = ")
        value, has_gone, gone = (rest if is_made else line).partition(";  ")
        value = _NAME.sub(lambda found: named.get(found[0], found[0]), value)
        if is_made:
            named[made] = free.pop() if free else f"v{len(named)}"
            value = f"{named[made]} = {value}"
        if has_gone:
            left = [named.pop(name, name) for name in gone.split(" = ")[:-1]]
            free += (name for name in left if name[0] == "v")
            value = " = ".join([f"{value}; {left[0]}", *left[1:], "None"])
        lines.append(f"{value}\n")
    return lines


def _attended(attend: LayerAttend, layer: int, *states: Any) -> Tensor:
    return attend(layer, *states)


def _has_no_mask(indices: Sequence[Tensor | None]) -> bool:
    """Whether the shape of an indexed tensor depends on no values."""
    return all(each is None or each.dtype not in (torch.bool, torch.uint8) for each in indices)


def record(forward: Forward, inputs: Sequence[Tensor], attend: LayerAttend) -> tuple[Tensor, Recording]:
    """Run a forward once; returns its output and the recording.

    Args:
        inputs: what it reads besides the model's own tensors; their values are others at other calls.

    Raises:
        NotRecordableError: its Python depends on values.
    """
    with _Recorder(inputs) as recorder:
        output = forward(recorder.attending(attend))
    return output, recorder.function(output)


@dataclass
class _Shape:
    """Steps of one shape. live: how many ran so before the recording; is_checked: it computed what a live step did."""

    live: int = 0
    recording: Recording | None = None
    is_checked: bool = False


@dataclass
class RecordedSteps:
    """The steps of a model in few tokens, from recordings.

    Attributes:
        reason: why there are none, in words; "" where steps are recorded. shapes: those that came, the last one last.
    """

    model: PreTrainedModel
    reason: str = ""
    shapes: OrderedDict[tuple[int, ...], _Shape] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._versions = WeightVersions(self.model)
        self.forget()

    def __str__(self) -> str:
        return self.reason or f"up to {MOST_TOKENS} tokens"

    def check(self) -> None:
        """Forget all recordings if the model has changed since the last call; to be called before each call's steps."""
        with gate_of(self.model.config).held():  # specdec's own forwards change some settings meanwhile
            changed = self._versions.changed()
        if changed:
            self.forget()

    def forget(self) -> None:
        """Drop all recordings, and with them what they hold of weights that were laid out anew."""
        self.shapes.clear()
        self._layouts = Matrix.layouts
        self.reason = unseen_state(self.model)

    def launch(self, live: Forward, inputs: Sequence[Tensor], attend: LayerAttend, aux: Tensor) -> Tensor:
        """The logits of a step, from a recording where there is one.

        Args:
            live: the step by the model itself, of these inputs: token ids [T] first.
            aux: [T', A·Ht] the memory to which it writes aux hidden states.
        """
        if self.reason or len(inputs[0]) > MOST_TOKENS:
            return live(attend)
        if self._layouts != Matrix.layouts:  # a recording reads weights in the memory that they had
            self.forget()
        shape = self._shape((*map(len, inputs), len(aux)))
        if shape.is_checked and shape.recording is not None:
            return shape.recording(attend, *inputs)
        if shape.live < _LIVE_STEPS:
            shape.live += 1
            return live(attend)
        if shape.recording is None:
            return self._record(shape, live, inputs, attend)
        found = shape.recording(attend, *inputs), aux.clone()
        logits = live(attend)
        shape.is_checked = True
        if not (torch.equal(found[0], logits) and torch.equal(found[1], aux)):
            self.reason = "a recording computed other numbers than the model's own Python"
        return logits

    def _shape(self, key: tuple[int, ...]) -> _Shape:
        shape = self.shapes.setdefault(key, _Shape())
        self.shapes.move_to_end(key)
        if len(self.shapes) > _MOST_SHAPES:
            self.shapes.popitem(last=False)
        return shape

    def _record(self, shape: _Shape, live: Forward, inputs: Sequence[Tensor], attend: LayerAttend) -> Tensor:
        try:
            logits, shape.recording = record(live, inputs, attend)
            return logits
        except NotRecordableError as error:
            self.reason = f"the model's Python depends on values ({error})"
        return live(attend)
