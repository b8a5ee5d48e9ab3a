"""torch.compile of target and head: the compiler's settings, and cos and sin kept as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as size_config

from specdec.compiler.fp8_passes import Fp8Rewriting
from specdec.compiler.regions import compile_regions
from specdec.errors import SpecdecError
from specdec.wrapped.alterations import Alterations


@torch.library.custom_op("specdec::stored", mutates_args=())
def stored(x: torch.Tensor) -> torch.Tensor:
    """A copy that the compiler cannot compute again where it is read."""
    return x.clone()


@stored.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def store_cos_sin(model: nn.Module, alterations: Alterations) -> int:
    """Keep rotary cos and sin as tensors in compiled code; left alone, every layer's kernel computes them again.

    Rotary modules are those with `inv_freq`, transformers' name of the frequencies in every model.

    Returns:
        The number of rotary modules.
    """

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() and isinstance(output, tuple):
            return tuple(stored(x) for x in output)
        return None

    found = [module for module in model.modules() if hasattr(module, "inv_freq")]
    for module in found:
        alterations.hook_after(module, hook)
    return len(found)


@contextmanager
def compiler_settings(batch_invariant: bool = False) -> Iterator[None]:
    """The compiler's settings while our code is compiled (compilation happens at the first call).

    Floats such as an epsilon are constants: taken as inputs, they make the compiler start over once it has found out
    that they are not, which doubles the time of tracing. And one process may hold many models: they share the code of
    `HeadPasses`, and each compiles it a few times, more than the eight times in all that are allowed by default.

    One code for all sizes: two sizes that happen to be equal at the first call (tokens and logits indices) stay two.

    batch_invariant: it rounds where eager code rounds, whatever it fuses, and its kernels are not chosen by timing.
    """
    options: dict[str, Any] = {"post_grad_custom_pre_pass": Fp8Rewriting(batch_invariant)}
    if batch_invariant:
        options |= {"emulate_precision_casts": True, "deterministic": True}
    sizes = size_config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    dynamo = torch._dynamo.config.patch(specialize_float=True, recompile_limit=256)
    with torch._inductor.config.patch(options), sizes, dynamo:
        yield


@contextmanager
def unwrapped(kind: type[SpecdecError]) -> Iterator[None]:
    """Raise an error of ours that the compiler met on its way as what it was.

    Raises:
        SpecdecError: of that kind, when there is one among the causes of what was raised inside; else that itself.
    """
    try:
        yield
    except Exception as error:
        found: BaseException | None = error
        while found is not None and not isinstance(found, kind):
            found = getattr(found, "inner_exception", None) or found.__cause__ or found.__context__
        if found is None or found is error:
            raise
        raise found from None


def for_any_batch(model: Callable[..., Any]) -> Callable[..., Any]:
    """A batch-invariant compiled model for calls of the self-test's: it runs the code of the graphs, compiled once.

    The self-test calls in inference mode, whose tensors the compiler would tell apart from those of the capture.
    """

    def run(**inputs: Any) -> Any:
        # Clones made here are normal tensors, like those of the capture; inference tensors would be compiled for again.
        with torch.inference_mode(False), torch.no_grad(), compiler_settings(batch_invariant=True):
            return model(**{name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()})

    return run


def compiled_model(model: nn.Module) -> Callable[..., Any]:
    """The model as one compiled graph for any number of tokens >= 2. Call it first inside `compiler_settings`."""
    return compiled(model)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors as one compiled graph for any number of rows. Call it first inside `compiler_settings`."""
    return torch.compile(function, backend=compile_regions, fullgraph=True, dynamic=True)
