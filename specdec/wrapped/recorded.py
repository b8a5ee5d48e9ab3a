"""Recorded steps: a forward of few tokens on a CPU as one flat function of its tensors.

A step of few tokens spends a quarter of its time on a CPU in the Python of the model's modules. A recording calls the
same operators, in the same order, without them. It holds for one shape, and only where Python decided nothing by a
tensor's values: a forward that reads one (`item`, `nonzero`, `if tensor`) is not recorded. The tensors that operators
read besides the inputs (weights, buffers) are read where they were: new values in place count, other tensors do not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import PreTrainedModel

from attention.hf.custom_op import LayerAttend
from attention.hf.gate import gate_of
from specdec.ops.packed_weight import Matrix
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
_DIRECT: dict[OpOverload, Callable[..., Any]] = {
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

Forward = Callable[[LayerAttend], Tensor]
"""A forward over given attention."""
Recording = Callable[..., Tensor]
"""(attention, *inputs) -> the output of the recorded forward for these inputs."""


class NotRecordableError(Exception):
    """A forward whose Python depends on values; the message has the operator."""


@dataclass(frozen=True)
class _Call:
    """A call in the source of a recording; reads, makes: names of tensors that operators made."""

    source: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]


class _Recorder(TorchDispatchMode):
    """Writes down the operators that run inside of it.

    Attributes:
        calls: of operators and of attention. values: what other names than those of inputs and results stand for.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.values: dict[str, Any] = {}
        self._names = {id(tensor): f"i{n}" for n, tensor in enumerate(inputs)}
        self._held: list[Any] = list(inputs)  # so that no id is that of two tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(tag in func.tags for tag in _BY_VALUE) and not (func is _ATEN.index.Tensor and _has_no_mask(args[1])):
            raise NotRecordableError(str(func))
        found = func(*args, **kwargs or {})
        self._add(self._named(_DIRECT.get(func, func._op), "c"), args, kwargs or {}, found)
        return found

    def attending(self, attend: LayerAttend) -> LayerAttend:
        """Attention that is recorded as one call, whatever it does."""

        def attended(layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
            with _disable_current_modes():
                found = attend(layer, query, key, value, sinks)
            self._add("attend", (layer, query, key, value, sinks), {}, found)
            return found

        return attended

    def function(self, num_inputs: int, output: Tensor) -> Recording:
        """The function of what was recorded. Raises NotRecordableError: no operator made the output."""
        result = self._names.get(id(output), "")
        if not result.startswith("t"):
            raise NotRecordableError("the output is no operator's")
        given = ", ".join(("attend", *(f"i{n}" for n in range(num_inputs))))
        source = "\n    ".join((f"def recorded({given}):", *_freeing(self.calls, result), f"return {result}"))
        scope = dict(self.values)
        exec(compile(source, "<recorded step>", "exec"), scope)
        made: Recording = scope["recorded"]
        return made

    def _add(self, function: str, args: Sequence[Any], kwargs: dict[str, Any], found: Any) -> None:
        reads, makes = list[str](), list[str]()
        given = [*(self._source(v, reads) for v in args), *(f"{k}={self._source(v, reads)}" for k, v in kwargs.items())]
        source = f"{self._target(found, makes)} = {function}({', '.join(given)})"
        self.calls.append(_Call(source, tuple(reads), tuple(makes)))

    def _target(self, found: Any, makes: list[str]) -> str:
        """What results are assigned to."""
        if isinstance(found, list | tuple):
            return f"({''.join(self._target(each, makes) + ', ' for each in found)})"
        if not isinstance(found, Tensor) or id(found) in self._names:
            return "_"
        makes.append(self._named(found, "t"))
        return makes[-1]

    def _source(self, value: Any, reads: list[str]) -> str:
        if isinstance(value, list | tuple):
            return f"[{''.join(self._source(each, reads) + ', ' for each in value)}]"
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        name = self._named(value, "c")
        reads += [name] * name.startswith("t")
        return name

    def _named(self, value: Any, kind: str) -> str:
        """Its name; kind: of a new one, t of a result, c of what stays as it is."""
        if id(value) not in self._names:
            name = self._names[id(value)] = f"{kind}{len(self._held)}"
            self._held.append(value)
            if kind == "c":
                self.values[name] = value
        return self._names[id(value)]


def _has_no_mask(indices: Sequence[Tensor | None]) -> bool:
    """Whether the shape of an indexed tensor depends on no values."""
    return all(each is None or each.dtype is not torch.bool for each in indices)


def _freeing(calls: Sequence[_Call], result: str) -> Iterator[str]:
    """Their source; each result is set free after the last call that reads it, so that its memory stays in caches."""
    last = {name: place for place, call in enumerate(calls) for name in (*call.makes, *call.reads)}
    over = dict[int, list[str]]()
    for name, place in last.items():
        if name != result:
            over.setdefault(place, []).append(name)
    for place, call in enumerate(calls):
        yield call.source
        if place in over:
            yield f"{' = '.join(over[place])} = None"


def record(forward: Forward, inputs: Sequence[Tensor], attend: LayerAttend) -> tuple[Tensor, Recording]:
    """Run a forward once; returns its output and the recording.

    Args:
        inputs: what it reads besides the model's own tensors; their values are others at other calls.

    Raises:
        NotRecordableError: its Python depends on values.
    """
    with _Recorder(inputs) as recorder:
        output = forward(recorder.attending(attend))
    return output, recorder.function(len(inputs), output)


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
        self._forget()

    def __str__(self) -> str:
        return self.reason or f"up to {MOST_TOKENS} tokens"

    def check(self) -> None:
        """Forget all recordings if the model has changed since the last call; to be called before each call's steps."""
        with gate_of(self.model.config).held():  # specdec's own forwards change some settings meanwhile
            changed = self._versions.changed()
        if changed:
            self._forget()

    def _forget(self) -> None:
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
            self._forget()
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
