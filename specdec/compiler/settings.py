"""torch.compile of target and head, with QKV and gate/up fusion.

Projections that read the same input (q, k, v; gate, up) are one matmul when their weights lie in one tensor. Each
projection stays a module of its own: in compiled code it computes the whole fused matmul and takes its slice, and
`passes` leaves one of the equal matmuls. In eager code it is the linear layer it was, on a view.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental import _config as size_config

from specdec.compiler.passes import Rewriting
from specdec.errors import SpecdecError


class SiblingLinear(nn.Linear):
    """A linear layer whose weight is a slice of a tensor that it shares with the other projections of its group."""

    def __init__(self, own: nn.Linear, fused_weight: torch.Tensor, fused_bias: torch.Tensor | None, start: int) -> None:
        """Take the place of `own`: rows start … start + out_features of fused_weight [sum of widths, in_features]."""
        # On meta: the weight is replaced below, so none is allocated.
        super().__init__(own.in_features, own.out_features, bias=False, device="meta")
        self.rows = slice(start, start + own.out_features)
        self.weight = nn.Parameter(fused_weight[self.rows], requires_grad=False)
        if fused_bias is not None:
            self.bias = nn.Parameter(fused_bias[self.rows], requires_grad=False)
        self.fused_weight = fused_weight
        self.fused_bias = fused_bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        if torch.compiler.is_compiling():
            return F.linear(input, self.fused_weight, self.fused_bias)[..., self.rows]
        return F.linear(input, self.weight, self.bias)


def fuse_siblings(root: nn.Module, run: Callable[[], object]) -> int:
    """Find linear layers of one parent that read the same tensor while `run` runs, and fuse their weights.

    The module keeps its parameters' names and values; weights that belong to two modules (tied) are left alone.

    Returns:
        The number of fused groups.
    """
    names = {module: name for name, module in root.named_modules() if type(module) is nn.Linear}
    owners = [p.data_ptr() for _, p in root.named_parameters(remove_duplicate=False)]
    readers: dict[tuple[str, int], list[str]] = {}
    kept: list[torch.Tensor] = []  # keeps the inputs alive, so that equal ids mean equal tensors

    def note(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        name = names[module]  # type: ignore[index]
        kept.append(args[0])
        readers.setdefault((name.rpartition(".")[0], id(args[0])), []).append(name)

    hooks = [module.register_forward_pre_hook(note) for module in names]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    groups = {tuple(dict.fromkeys(group)) for group in readers.values()}
    fused = [group for group in groups if len(group) > 1 and _fusible(root, group, owners)]
    for group in fused:
        _fuse(root, group)
    return len(fused)


def _fusible(root: nn.Module, group: tuple[str, ...], owners: list[int]) -> bool:
    layers: list[Any] = [root.get_submodule(name) for name in group]
    kinds = {(layer.weight.dtype, layer.weight.device, layer.bias is None) for layer in layers}
    return len(kinds) == 1 and all(owners.count(layer.weight.data_ptr()) == 1 for layer in layers)


def _fuse(root: nn.Module, group: tuple[str, ...]) -> None:
    layers: list[Any] = [root.get_submodule(name) for name in group]
    weight = torch.cat([layer.weight.detach() for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    start = 0
    for name, layer in zip(group, layers, strict=True):
        parent, _, child = name.rpartition(".")
        setattr(root.get_submodule(parent), child, SiblingLinear(layer, weight, bias, start))
        start += layer.out_features


@torch.library.custom_op("specdec::stored", mutates_args=())
def stored(x: torch.Tensor) -> torch.Tensor:
    """A copy that the compiler cannot compute again where it is read."""
    return x.clone()


@stored.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def store_angles(model: nn.Module) -> int:
    """Keep rotary cos and sin as tensors in compiled code; otherwise the compiler fuses them into every layer's kernel.

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
        module.register_forward_hook(hook)
    return len(found)


@contextmanager
def compiler_settings(batch_invariant: bool = False) -> Iterator[None]:
    """The compiler's settings while our code is compiled (compilation happens at the first call).

    Floats such as an epsilon are constants: taken as inputs, they make the compiler start over once it has found out
    that they are not, which doubles the time of tracing. And one process may hold many models: they share the code of
    `HeadPasses`, and each compiles it a few times, more than the eight times in all that are allowed by default.

    batch_invariant: one code for all sizes (two sizes that happen to be equal at the first call stay two), which rounds
    where eager code rounds, whatever it fuses, and whose kernels are not chosen by timing.
    """
    options: dict[str, Any] = {"post_grad_custom_pre_pass": Rewriting(batch_invariant)}
    if batch_invariant:
        options |= {"emulate_precision_casts": True, "deterministic": True}
    sizes = size_config.patch(use_duck_shape=not batch_invariant)  # type: ignore[attr-defined]
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
    """A batch-invariant compiled model for calls of the engine's: it runs the code of the graphs, compiled once.

    The engine calls in inference mode, whose tensors the compiler would treat as different from those of the capture.
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
    return torch.compile(function, fullgraph=True, dynamic=True)
