"""Triton's interpreter, hastened: the same results and the same checks, without what it does again at every call.

More than half of its time goes into preparations: which names of `triton.language` are builtins, listed at every launch
and at every call of a device function; a table of dtypes, made whenever one is looked up; the shape of every tensor;
and integer sums and products that are computed a second time in int64, to see whether they overflow, for an assertion
that is not made.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from triton.language.core import is_builtin, tensor
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def hasten() -> None:
    """Replace the slow parts, in this process."""
    _list_builtins_once()
    _patch_once_a_launch()
    _look_dtypes_up()
    _share_shapes()
    _sanitize_for_debug_alone()


def _list_builtins_once() -> None:
    """Which of a module's names are builtins does not change; what they name now is read every time."""
    names: dict[Any, list[str]] = {}

    def members(owner: Any) -> list[tuple[str, Any]]:
        if owner not in names:
            names[owner] = [name for name, member in inspect.getmembers(owner) if is_builtin(member)]
        return [(name, getattr(owner, name)) for name in names[owner]]

    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getmembers": members})


def _patch_once_a_launch() -> None:
    """A device function patches the language again, which stays until its launch ends: once for each file it is in."""
    launch, call = interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.__call__
    plain, patched, inside = vars(interpreter)["_patch_lang"], set[int](), [False]

    def launching(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        inside[0] = False
        return launch(self, *args, **kwargs)

    def calling(self: Any, *args: Any, **kwargs: Any) -> Any:
        inside[0] = True
        return call(self, *args, **kwargs)

    def patch_lang(fn: Any) -> Any:
        if inside[0] and id(fn.__globals__) in patched:
            return None  # of a device function: nobody looks at it
        patched.add(id(fn.__globals__))
        return plain(fn)

    interpreter.GridExecutor.__call__ = launching
    interpreter.InterpretedFunction.__call__ = calling
    patch.object(interpreter, "_patch_lang", patch_lang).start()


def _look_dtypes_up() -> None:
    """numpy's dtype of a type is that of its elements, by name; of any pointer the same."""
    plain, by_name = vars(interpreter)["_get_np_dtype"], dict[str, Any]()

    def np_dtype(kind: Any) -> Any:
        scalar = kind.scalar
        name = "pointer" if scalar.is_ptr() else scalar.name
        if name not in by_name:
            by_name[name] = plain(kind)
        return by_name[name]

    patch.object(interpreter, "_get_np_dtype", np_dtype).start()


def _share_shapes() -> None:
    """Tensors of one shape hold the same object for it; nobody changes one."""
    plain, shapes = tensor.__init__, dict[tuple[int, ...], tuple[Any, Any]]()

    def init(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            plain(self, handle, type)
            shapes[key] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    tensor.__init__ = init


def _sanitize_for_debug_alone() -> None:
    """Whether an integer operation overflows is computed for `tl.device_assert`, which only debug mode carries out."""
    plain = TritonSemantic.binary_op_sanitize_overflow_impl

    def sanitize(self: TritonSemantic, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            plain(self, lhs, rhs, binary_op)

    TritonSemantic.binary_op_sanitize_overflow_impl = sanitize
