"""Weights of linear layers in the layout in which oneDNN reads them on a CPU, and nowhere else.

A matrix of a few rows times a weight takes as long as reading the weight. In rows of memory it is read once for each
input row or two, or copied into oneDNN's blocks at every call; laid out in blocks once, all rows share one reading.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only, tree_unflatten

from specdec.errors import ModelChangedError

ONEDNN = torch.ops.mkldnn
FEWEST_ROWS = 4
"""In float32 fewer input rows are filled up with zeros to so many. CPU ms for all layers of a model of 135M weights but
its lm_head, one thread of an AMD EPYC 9004: 33, 39, 30 with 1, 2, 3 rows, 28 with 4; bfloat16 takes 17 to 18 with any."""


_THE_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class Matrix:
    """A weight [O, I] in one piece of memory.

    Attributes:
        memory: in oneDNN's blocks, or a plain tensor where the weight is read in other ways too (tied embeddings).
        blocks: whether it is in blocks.
        number: another one after each write, of this matrix and of any other.
    """

    _numbers = count(1)

    def __init__(self, weight: Tensor, blocks: bool) -> None:
        """blocks: False: `weight` itself is read."""
        self.blocks, self.memory = blocks, weight
        self.write(weight)

    def read(self) -> Tensor:
        """As a plain tensor: a copy, if it is in blocks."""
        return self.memory.to_dense() if self.blocks else self.memory

    def write(self, weight: Tensor) -> None:
        """New values. A plain tensor was written to in place."""
        self.number = next(self._numbers)
        if self.blocks:
            self.memory = ONEDNN._reorder_linear_weight(weight.contiguous())
        elif weight is not self.memory:
            self.memory.copy_(weight)

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., I], bias [O] or None -> x · weightᵀ + bias [..., O]."""
        width = x.shape[-1]
        rows = x.numel() // width
        if x.dtype is not torch.float32 or not 0 < rows < FEWEST_ROWS:
            found: Tensor = ONEDNN._linear_pointwise(x, self.memory, bias, "none", [], "")
            return found
        filled = F.pad(x.reshape(rows, width), (0, 0, 0, FEWEST_ROWS - rows))
        found = ONEDNN._linear_pointwise(filled, self.memory, bias, "none", [], "")[:rows]
        return found.view(*x.shape[:-1], found.shape[1])


@dataclass(frozen=True)
class _View:
    """A view of a tensor: of the first argument of `function`, which may return several, the one at `place`."""

    function: Callable[..., Any]
    rest: tuple[Any, ...]
    named: dict[str, Any]
    place: int | None

    def of(self, tensor: Tensor) -> Tensor:
        found = self.function(tensor, *self.rest, **self.named)
        return found if self.place is None else found[self.place]


class PackedWeight(Tensor):
    """A `Matrix`, or a view of one, that is used as any tensor: a linear layer multiplies by it as it is laid out;
    any other function gets a plain copy, which is laid out again where it was written to."""

    matrix: Matrix
    views: tuple[_View, ...]

    @staticmethod
    def __new__(cls, matrix: Matrix, like: Tensor, views: tuple[_View, ...] = ()) -> PackedWeight:
        """like: a tensor of the view's shape, strides and dtype, on any device."""
        make: Any = Tensor._make_wrapper_subclass
        with torch.inference_mode(False):  # torch counts writes to it
            made: PackedWeight = make(cls, like.shape, like.stride(), dtype=like.dtype, device="cpu")
        made.matrix, made.views = matrix, views
        return made

    def plain(self) -> Tensor:
        """The values as a plain tensor, which no write to it changes."""
        return self._seen(self.matrix.read())

    def _seen(self, whole: Tensor) -> Tensor:
        for view in self.views:
            whole = view.of(whole)
        return whole

    def data_ptr(self) -> int:
        """The matrix's number, by which `WeightVersions` sees new values; there is no memory to read at it."""
        return self.matrix.number

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self._as_plain())

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return repr(self._as_plain())

    def _as_plain(self) -> Tensor:
        found = self.plain().detach().clone()
        return nn.Parameter(found, self.requires_grad) if isinstance(self, nn.Parameter) else found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and (found := _product(*args)) is not None:
            return found
        if func == Tensor.data.__set__:
            return _replaced(*args)
        with DisableTorchFunctionSubclass():  # else every result would be of this class
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view and isinstance(args[0], PackedWeight):
            return _viewed(func, args[0], args[1:], kwargs)
        if func._schema.is_mutable:
            return _written(func, args, kwargs)
        args, kwargs = tree_map_only(PackedWeight, PackedWeight.plain, (args, kwargs))
        return func(*args, **kwargs)


def _product(x: Any, weight: Any, bias: Any = None) -> Tensor | None:
    """x · weightᵀ + bias; None where it is to be computed from a plain copy: of a view, or for gradients."""
    graded = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, weight, bias))
    if type(weight) is not PackedWeight or weight.views or x.dtype != weight.dtype or graded or x.dim() < 2:
        return None
    return weight.matrix.times(x, bias)


def _replaced(weight: PackedWeight, values: Tensor) -> None:
    """`weight.data = values`: the matrix gets these values.

    Raises:
        ModelChangedError: they have another shape, dtype or device.
    """
    same = (values.shape, values.dtype, values.device) == (weight.shape, weight.dtype, weight.device)
    if weight.views or not same:
        raise ModelChangedError(
            f"weights in oneDNN's layout stay {weight.dtype} {list(weight.shape)} on a CPU, given are {values.dtype} "
            f"{list(values.shape)} on {values.device}; close the SpeculativeModel before, or load with "
            "cpu_linears='plain'"
        )
    if not (_is_packed(values) and values.matrix is weight.matrix):
        weight.matrix.write(values.plain() if isinstance(values, PackedWeight) else values.detach())


def _viewed(func: Any, base: PackedWeight, rest: Any, named: Any) -> Any:
    """What a function that returns views returns."""
    if func in _THE_SAME:
        return PackedWeight(base.matrix, base, base.views)
    like = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    found = func(like, *rest, **named)
    many = isinstance(found, (list, tuple))
    views = [
        PackedWeight(base.matrix, each, (*base.views, _View(func, rest, named, place if many else None)))
        for place, each in enumerate(found if many else [found])
    ]
    return views if many else views[0]


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a function that writes to its arguments on plain tensors, then lay out again what was written."""
    names = [argument.name for argument in func._schema.arguments]
    changed = {each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write}
    given = dict(zip(names, args, strict=False)) | kwargs
    written = [each for each in tree_iter([given[name] for name in changed & given.keys()]) if _is_packed(each)]
    wholes = {each.matrix: each.matrix.read() for each in written}
    leaves, shape = tree_flatten((args, kwargs))
    plain = {id(each): each._seen(wholes[each.matrix]) if each.matrix in wholes else each.plain() for each in leaves if _is_packed(each)}
    own_args, own_kwargs = tree_unflatten([plain.get(id(each), each) for each in leaves], shape)
    places = [(plain[id(each)], plain[id(each)].data_ptr()) for each in written]
    found = func(*own_args, **own_kwargs)
    if any(each.data_ptr() != place for each, place in places):
        raise ModelChangedError(f"{func} would give a weight in oneDNN's layout other memory; load with cpu_linears='plain'")
    for matrix, whole in wholes.items():
        matrix.write(whole)
    packed = {id(plain[id(each)]): each for each in written}
    return tree_map_only(Tensor, lambda each: packed.get(id(each), each), found)


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedWeight)
