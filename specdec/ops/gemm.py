"""cuBLASLt algorithms of matmuls: which one each shape runs by in this process, and the library through nvmath-python.

Accumulated and, where a sum is split, added up in float32. Nothing here keeps memory of the device between calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention.backends.limits import dtype_name
from attention.errors import named_error

_ALIGNED = 16
"""Bytes: rows and addresses that the chosen algorithms may read and write at once."""


class ProductShape(NamedTuple):
    """x [tokens, width] · weightᵀ [width, rows] in one dtype, all of them without gaps.

    >>> str(ProductShape(torch.bfloat16, 6144, 4096, 96))
    'bfloat16 6144x4096 96'
    """

    dtype: torch.dtype
    rows: int
    width: int
    tokens: int

    def __str__(self) -> str:
        """The name of the shape in a file of choices."""
        return f"{dtype_name(self.dtype)} {self.rows}x{self.width} {self.tokens}"

    @property
    def is_aligned(self) -> bool:
        """Whether every row of weight, input and output begins at a multiple of 16 bytes."""
        size = self.dtype.itemsize
        return self.rows * size % _ALIGNED == 0 == self.width * size % _ALIGNED


def aligned(*tensors: Tensor) -> bool:
    """Whether each lies in memory without gaps, from a multiple of 16 bytes on."""
    return all(x.is_contiguous() and x.data_ptr() % _ALIGNED == 0 for x in tensors)


Launch = Callable[[Tensor, Tensor], Tensor]
"""x [T, I], weight [O, I] -> x · weightᵀ [T, O], queued on the current stream."""


@dataclass(frozen=True)
class Algorithm:
    """One of cuBLASLt's algorithms: a description, valid for one version of the library, and its workspace in bytes."""

    data: bytes
    workspace: int


_launches: dict[tuple[torch.device, ProductShape, bool], Launch] = {}


def use(device: torch.device, shape: ProductShape, launch: Launch, invariant: bool = False) -> None:
    """From now on, matmuls of this shape on this device run by `launch`; invariant: batch-invariant ones alone."""
    _launches[device, shape, invariant] = launch


def forget() -> None:
    """Back to the usual calls, but for graphs that were captured."""
    _launches.clear()


def chosen_launch(x: Tensor, weight: Tensor, invariant: bool = False) -> Launch | None:
    """The algorithm chosen for x [T, I] · weightᵀ [I, O], or None; invariant: of those that do not depend on T."""
    if not _launches:
        return None
    rows, width = weight.shape
    shape = ProductShape(x.dtype, rows, width, len(x))
    launch = _launches.get((x.device, shape, invariant))
    return launch if launch is not None and aligned(x, weight) else None


_WORKSPACES = (0, 4 << 20, 32 << 20)
"""Workspace limits in bytes of the queries: the library lists other algorithms at each limit."""
_ASKED = 64
_ALGORITHM_BYTES = 64
_TRANSPOSED = 1
_KINDS = {torch.float16: 2, torch.bfloat16: 14}
"""cudaDataType_t."""
_FLOAT32 = 0


class Library:
    """cuBLASLt on one device.

    Attributes:
        device: the CUDA device; version: the library's, as one number; lt: the binding; handle: the device's handle.
    """

    def __init__(self, device: torch.device) -> None:
        """Raises:
        Exception: nvmath-python or its library is missing, or does not work here.
        """
        from nvmath.bindings import cublas, cublasLt

        self.device = device
        self.lt: Any = cublasLt
        self.compute_type = int(cublas.ComputeType.COMPUTE_32F)
        with torch.cuda.device(device):
            self.handle = int(cublasLt.create())
        self.version = int(cublasLt.get_version())

    def matmul(self, shape: ProductShape) -> Matmul:
        """The library's algorithms for one shape."""
        return Matmul(self, shape)


class Matmul:
    """x [T, I] · weightᵀ [I, O] of one shape. The library counts by columns: Dᵀ [O, T] = weight [O, I] · xᵀ [I, T].

    Its descriptors, some hundred bytes of the host, are kept as long as the process lives.
    """

    def __init__(self, library: Library, shape: ProductShape) -> None:
        self.shape = shape
        self._library = library
        self._lt = library.lt
        lt = self._lt
        kind = _KINDS[shape.dtype]
        self._operation = lt.matmul_desc_create(library.compute_type, _FLOAT32)
        transposed = lt.MatmulDescAttribute.TRANSA
        value = np.array([_TRANSPOSED], lt.get_matmul_desc_attribute_dtype(transposed))
        lt.matmul_desc_set_attribute(self._operation, transposed, value.ctypes.data, value.nbytes)
        rows, width, tokens = shape[1:]
        self._weight = lt.matrix_layout_create(kind, width, rows, width)
        self._x = lt.matrix_layout_create(kind, width, tokens, width)
        self._out = lt.matrix_layout_create(kind, rows, tokens, rows)

    def algorithms(self) -> list[Algorithm]:
        """All that the library lists for this shape, its first choice first."""
        found: dict[bytes, Algorithm] = {}
        for limit in reversed(_WORKSPACES):
            for algorithm in self._listed(limit):
                found.setdefault(algorithm.data, algorithm)
        return list(found.values())

    def supports(self, algorithm: Algorithm) -> bool:
        """Whether the library runs this algorithm on this shape in the workspace that is named."""
        if len(algorithm.data) != _ALGORITHM_BYTES or algorithm.workspace > max(_WORKSPACES):
            return False
        data = np.frombuffer(algorithm.data, np.uint8).copy()
        result = self._results(1)
        layouts = (self._weight, self._x, self._out, self._out)
        try:
            self._lt.matmul_algo_check(
                self._library.handle, self._operation, *layouts, data.ctypes.data, result.ctypes.data
            )
        except self._lt.cuBLASLtError:
            return False
        return int(result["state"][0]) == 0 and int(result["workspace_size"][0]) <= algorithm.workspace

    def launcher(self, algorithm: Algorithm) -> Launch:
        """Runs one algorithm, which the library supports.

        Its workspace is the allocator's, as its output is: ordered on the stream of the call, and inside a CUDA graph
        part of the graph's memory.
        """
        # Kept by the function, because the library gets their addresses: the algorithm, and alpha = 1, beta = 0.
        data = np.frombuffer(algorithm.data, np.uint8).copy()
        factors = np.array([1, 0], np.float32)
        size = algorithm.workspace
        shape = (self.shape.tokens, self.shape.rows)

        def launch(x: Tensor, weight: Tensor) -> Tensor:
            out = x.new_empty(shape)
            one = factors.ctypes.data
            workspace = x.new_empty(size, dtype=torch.uint8) if size else None
            to = out.data_ptr()
            scratch = 0 if workspace is None else workspace.data_ptr()
            read = (self._operation, one, weight.data_ptr(), self._weight, x.data_ptr(), self._x)
            written = (one + factors.itemsize, to, self._out, to, self._out)
            stream = torch.cuda.current_stream(x.device).cuda_stream
            self._lt.matmul(self._library.handle, *read, *written, data.ctypes.data, scratch, size, stream)
            return out

        return launch

    def _listed(self, workspace: int) -> list[Algorithm]:
        """The library's list at one limit of the workspace; empty when it has none."""
        lt = self._lt
        results = self._results(_ASKED)
        count = np.zeros(1, np.int32)
        preference = lt.matmul_preference_create()
        try:
            self._prefer(preference, "MAX_WORKSPACE_BYTES", workspace)
            # Split-K may sum partial results only in the compute type, float32, not rounded to half precision.
            self._prefer(preference, "REDUCTION_SCHEME_MASK", int(lt.ReductionScheme.COMPUTE_TYPE))
            for operand in "ABCD":
                self._prefer(preference, f"MIN_ALIGNMENT_{operand}_BYTES", 16)  # `aligned` checks it
            layouts = (self._weight, self._x, self._out, self._out)
            places = (results.ctypes.data, count.ctypes.data)
            lt.matmul_algo_get_heuristic(self._library.handle, self._operation, *layouts, preference, _ASKED, *places)
        except lt.cuBLASLtError:
            return []
        finally:
            lt.matmul_preference_destroy(preference)
        good = (each for each in results[: count[0]] if each["state"] == 0)
        return [Algorithm(each["algo"]["data_"].tobytes(), int(each["workspace_size"])) for each in good]

    def _prefer(self, preference: int, name: str, value: int) -> None:
        attribute = self._lt.MatmulPreferenceAttribute[name]
        data = np.array([value], self._lt.get_matmul_preference_attribute_dtype(attribute))
        self._lt.matmul_preference_set_attribute(preference, attribute, data.ctypes.data, data.nbytes)

    def _results(self, count: int) -> np.ndarray:
        return np.zeros(count, self._lt.matmul_heuristic_result_dtype)


@cache
def library_of(device: torch.device) -> Library | str:
    """cuBLASLt on a device, or the reason why it is not available."""
    try:
        return Library(device)
    except ModuleNotFoundError as error:
        return f"no {error.name}: nvmath-python is part of the extra [cuda]"
    except Exception as error:  # a library that does not load; RuntimeError and the binding's own, which share no root
        return f"nvmath-python does not work here: {named_error(error)}"
