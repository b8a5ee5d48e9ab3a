"""Weights of linear layers on a CPU in the layout in which oneDNN reads them.

A product of a few rows takes as long as reading the weight. In rows of memory a weight is read again for every row or
two, or copied into oneDNN's blocks at every call. Laid out in blocks beforehand, it is read once for all of them.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.utils._pytree import tree_map_only

from specdec.errors import ModelChangedError

ONEDNN = torch.ops.mkldnn
FEWEST_ROWS = 4
"""In float32 fewer input rows are filled up with zeros to so many. CPU ms of all layers of a model of 135M weights but
its lm_head, one thread of an AMD EPYC 9004: 35, 38, 28 with 1, 2, 3 rows, 27 with 4; in bfloat16 17, 18, 16, 15."""
_BLOCK = 64
"""Rows of a weight that oneDNN lays out together where it computes by AVX-512."""
EVEN_ROWS = 2
"""From so many rows on, oneDNN gives an input row the same bits whatever their number and its place, by packed and by
plain weights. Measured for 12 shapes up to [49152, 576] and [512, 11008] in float32 and bfloat16, 2 to 64 rows and 18
larger numbers up to 2,048, with 1 to 32 threads, by AVX2 and AVX-512. A row alone has other bits."""
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_ALONE = 2
"""torch's count of a storage that one tensor holds, while it is counted."""


class Matrix:
    """Weights of layers that read one input, [sum of O, I] in one piece of memory.

    Attributes:
        memory: them, in oneDNN's blocks or plainly. packed: whether in blocks. sizes: rows of each layer's. blocks: see
            `blocks_of`, None of one that is no embedding. last: an input of which not all layers have had their
            products yet, writes to it, the products, and whose they are.
    """

    layouts: ClassVar = 0
    """How often any matrix was given other memory."""

    def __init__(self, weights: list[Tensor], tied: bool, fewest: int = 0) -> None:
        """tied: the one weight is an embedding as well. Where its rows cannot be read from the blocks, it stays plain
        memory, which oneDNN reads as it is. fewest: fewer input rows are filled up with zeros to so many."""
        self.memory = torch.cat(weights)
        self.sizes = [len(weight) for weight in weights]
        self.packed = False
        self._tied = tied
        self._fewest = fewest
        self.blocks: Tensor | None = None
        self.last: tuple[Tensor, int, tuple[Tensor, ...], set[int]] | None = None
        self.pack()

    def pack(self) -> None:
        """Lay it out in blocks, unless somebody else has a view of its memory: what they write would be lost."""
        if self.packed or torch._C._storage_Use_Count(self.memory.untyped_storage()._cdata) != _ALONE:
            return
        with torch.inference_mode(False):
            laid_out = ONEDNN._reorder_linear_weight(self.memory)
            self.blocks = blocks_of(laid_out, self.memory) if self._tied else None
        if not self._tied or self.blocks is not None:
            self.memory = laid_out
            self.packed = True
            Matrix.layouts += 1

    def read(self) -> Tensor:
        """Its values, in memory that may be its own."""
        return self.memory.to_dense() if self.packed else self.memory

    def unpack(self) -> Tensor:
        """Its memory, plain from now on, for those who write to it or keep views of it."""
        self.memory = self.read()
        self.packed = False
        self.blocks = None
        Matrix.layouts += 1
        return self.memory

    def rows(self, ids: Tensor) -> Tensor | None:
        """Those of an embedding, [..., I] of ids [...]; None where the blocks are not there to read.

        Raises:
            IndexError: an id of no row.
        """
        if self.blocks is None:
            return None
        block = (ids // _BLOCK).where(ids >= 0, len(self.blocks))  # an index below zero would be one from the end
        return self.blocks[block, :, ids % _BLOCK].contiguous().view(self.memory.dtype)

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., I], bias [sum of O] or None -> x · weightᵀ + bias [..., sum of O]."""
        fewest = FEWEST_ROWS if self.packed and x.dtype is torch.float32 else self._fewest
        return filled_linear(x, self.memory, bias, fewest)

    def part(self, x: Tensor, place: int) -> Tensor:
        """One layer's part of x · weightᵀ, which is computed for all layers at the first one's call with an input.

        Each of them gets it once, of the same unchanged tensor.
        """
        last = self.last
        writes = 0 if x.is_inference() else x._version
        if last is None or last[0] is not x or last[1] != writes or place not in last[3]:
            found = self.times(x, None).split(self.sizes, -1)
            last = self.last = x, writes, found, set(range(len(found)))
        last[3].remove(place)
        if not last[3]:
            self.last = None  # it may be large
        return last[2][place]


def filled_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, fewest: int = EVEN_ROWS) -> Tensor:
    """x [..., I] · weightᵀ [I, O] + bias by oneDNN, fewer rows filled up to `fewest`; by default a row gets the same
    bits beside any others."""
    count = x.shape[-2]
    few = 0 < count < fewest and x.numel() == count * x.shape[-1]
    found: Tensor = ONEDNN._linear_pointwise(
        F.pad(x, (0, 0, 0, fewest - count)) if few else x, weight, bias, "none", [], ""
    )
    return found[..., :count, :] if few else found


class PackedWeight(Tensor):
    """A layer's rows of a `Matrix` in place of its weight: a linear layer multiplies by them as they are laid out.

    Other functions read a plain copy; for those that write or make views the matrix becomes plain memory, by which
    layers multiply more slowly, until it is packed again.
    """

    matrix: Matrix
    place: int

    @staticmethod
    def __new__(cls, matrix: Matrix, place: int, like: Tensor) -> PackedWeight:
        """like: a tensor of its shape and dtype."""
        make: Any = Tensor._make_wrapper_subclass
        with torch.inference_mode(False):  # torch counts writes to it
            made: PackedWeight = make(cls, like.shape, dtype=like.dtype, device="cpu")
        made.matrix = matrix
        made.place = place
        return made

    def plain(self) -> Tensor:
        """A copy as a plain tensor; of a tied weight its own memory."""
        return self.matrix.read().split(self.matrix.sizes)[self.place]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__deepcopy__({}).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        found = self.plain().clone()
        return memo.setdefault(id(self), nn.Parameter(found, self.requires_grad))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.__deepcopy__({}))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and (found := _product(*args)) is not None:
            return found
        writes = torch.is_grad_enabled() or func is not F.embedding or kwargs["max_norm"]
        if not writes and (found := args[1].matrix.rows(args[0])) is not None:
            return found
        if func == _SET_DATA:
            return _replaced(*args)
        with DisableTorchFunctionSubclass():  # else every result would be of this class
            return func(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return PackedWeight(args[0].matrix, args[0].place, args[0])
        plain = {}

        def read(weight: PackedWeight) -> Tensor:
            if func.is_view or func._schema.is_mutable:
                weight.matrix.unpack()
            found = weight.plain()
            plain[id(found)] = weight
            return found

        args, kwargs = tree_map_only(PackedWeight, read, (args, kwargs or {}))
        return tree_map_only(Tensor, lambda found: plain.get(id(found), found), func(*args, **kwargs))


def _product(x: Any, weight: Any, bias: Any = None) -> Tensor | None:
    """x · weightᵀ + bias; None where gradients are recorded, or of an input that oneDNN does not take."""
    if torch.is_grad_enabled() or type(weight) is not PackedWeight or x.dtype != weight.dtype or x.dim() < 2:
        return None
    matrix = weight.matrix
    return matrix.times(x, bias) if len(matrix.sizes) == 1 else matrix.part(x, weight.place)


def blocks_of(packed: Tensor, plain: Tensor) -> Tensor | None:
    """The memory of a packed weight [O, I] as int32 [O / 64, n, 64]: a row's n pieces of 4 bytes.

    So oneDNN lays a weight out by AVX-512; None where it has done otherwise. Padding only makes its memory longer.
    """
    if len(plain) % _BLOCK or plain.shape[1] % 2:
        return None
    memory = (ctypes.c_char * plain.nbytes).from_address(ONEDNN.data_ptr(packed))
    pieces = plain.view(torch.int32).unflatten(0, (-1, _BLOCK)).mT
    blocks = torch.frombuffer(memory, dtype=torch.int32).view(pieces.shape)
    return blocks if torch.equal(blocks, pieces) else None


def _replaced(weight: PackedWeight, values: Tensor) -> None:
    """`weight.data = values`: written in place. Raises ModelChangedError: they have another dtype or device."""
    if values.dtype != weight.dtype or values.device != weight.device:
        raise ModelChangedError(
            f"weights in oneDNN's layout stay {weight.dtype} on a CPU, given are {values.dtype} on {values.device}; "
            "close the SpeculativeModel before, or load with cpu_linears='plain'"
        )
    with torch.no_grad():
        weight.copy_(values)
