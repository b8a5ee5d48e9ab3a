"""torch.compile of target and head, with sibling projections fused.

Projections that read the same input (q, k, v; gate, up) are one matmul when their weights lie in one tensor. Each
sibling stays a module of its own: in compiled code it asks for the whole fused product and takes its slice, and
`rewriting` leaves one of the equal products. In eager code it is the linear layer it was, on a view. What is done to
the modules is registered with `specdec.target.alterations`, and undone when the engine is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental import _config as size_config

from attention.hf.custom_op import Channel, opaque_attend
from attention.hf.gate import gate_of
from attention.hf.interface import attention_configs
from drafters.base import Attend, Head
from drafters.eagle3.head import Eagle3Head
from drafters.mtp.head import MtpHead
from specdec.compiler.passes import Rewriting
from specdec.errors import SpecdecError
from specdec.ops.argmax import greedy_ids
from specdec.target.alterations import Alterations


class SiblingLinear(nn.Linear):
    """A linear layer whose weight is a slice of a tensor it shares with its siblings.

    The user's own `nn.Linear` of another class for a while: the module and its parameters stay the same objects, so
    that hooks, optimisers and adapters keep what they hold; only the parameters' memory moves.

    Attributes:
        fused_weight: [sum of widths, in_features]; fused_bias: [sum of widths] or None.
        rows: of these two, the layer's own.
        holders: the engines whose compiled code reads it.
    """

    rows: slice
    fused_weight: torch.Tensor
    fused_bias: torch.Tensor | None
    holders: set[object]

    @staticmethod
    def join(own: nn.Linear, fused_weight: torch.Tensor, fused_bias: torch.Tensor | None, start: int) -> SiblingLinear:
        """Make rows start … start + out_features of fused_weight the weight of `own`, which holds these values."""
        rows = slice(start, start + own.out_features)
        own.weight.data = fused_weight[rows]
        if fused_bias is not None:
            own.bias.data = fused_bias[rows]
        sibling: Any = own
        sibling.__class__ = SiblingLinear
        sibling.rows, sibling.fused_weight, sibling.fused_bias = rows, fused_weight, fused_bias
        sibling.holders = set()
        return sibling  # type: ignore[no-any-return]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        if torch.compiler.is_compiling():
            return F.linear(input, self.fused_weight, self.fused_bias)[..., self.rows]
        return F.linear(input, self.weight, self.bias)

    @property
    def is_stale(self) -> bool:
        """Whether its parameters no longer lie in the fused tensors: the model was moved or got other parameters."""
        return any(
            fused is None or own.data_ptr() != fused[self.rows].data_ptr() or own.dtype != fused.dtype
            for own, fused in ((self.weight, self.fused_weight), (self.bias, self.fused_bias))
            if own is not None
        )

    def part(self) -> None:
        """Make it the `nn.Linear` that it was, with its present values in memory of its own."""
        for own, fused in ((self.weight, self.fused_weight), (self.bias, self.fused_bias)):
            if own is not None and fused is not None and _share_memory(own, fused):
                own.data = own.data.clone()
        del self.rows, self.fused_weight, self.fused_bias, self.holders
        plain: Any = self
        plain.__class__ = nn.Linear


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def fuse_siblings(root: nn.Module, run: Callable[[], object], alterations: Alterations) -> int:
    """Find linear layers of one parent that read the same tensor while `run` runs, and fuse their weights.

    Weights that belong to two modules (tied) are left alone. Layers that are fused already, for another engine, stay so
    until the last of these engines lets go; layers that were moved since are fused anew.

    Returns:
        The number of newly fused groups.
    """
    fused_before = [module for module in root.modules() if isinstance(module, SiblingLinear)]
    for module in fused_before:
        if module.is_stale:
            module.part()
    count = _fuse_groups(root, run)
    siblings, holder = [module for module in root.modules() if isinstance(module, SiblingLinear)], object()
    for module in siblings:
        module.holders.add(holder)
    alterations.on_undo(partial(_let_go, siblings, holder, attention_configs(root)))
    return count


def _let_go(siblings: list[SiblingLinear], holder: object, configs: Sequence[Any]) -> None:
    """One engine less that reads them; without any they are what they were. No forward runs meanwhile."""
    with gate_of(configs[0] if configs else None).held(), torch.no_grad():
        for module in siblings:
            if isinstance(module, SiblingLinear) and holder in module.holders:
                module.holders.remove(holder)
                if not module.holders:
                    module.part()


def _fuse_groups(root: nn.Module, run: Callable[[], object]) -> int:
    """Fuse what reads the same tensor while `run` runs; the number of groups."""
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
    plain = all(layer.weight.is_contiguous() and type(layer.weight.data) is torch.Tensor for layer in layers)
    return plain and len(kinds) == 1 and all(owners.count(layer.weight.data_ptr()) == 1 for layer in layers)


def _fuse(root: nn.Module, group: tuple[str, ...]) -> None:
    layers: list[Any] = [root.get_submodule(name) for name in group]
    weight = torch.cat([layer.weight.detach() for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    start = 0
    for layer in layers:
        SiblingLinear.join(layer, weight, bias, start)
        start += layer.out_features


@torch.library.custom_op("specdec::stored", mutates_args=())
def stored(x: torch.Tensor) -> torch.Tensor:
    """A copy that the compiler cannot compute again where it is read."""
    return x.clone()


@stored.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def store_angles(model: nn.Module, alterations: Alterations) -> int:
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

    batch_invariant: one code for all sizes (two sizes that happen to be equal at the first call stay two), which rounds
    where eager code rounds, whatever it fuses, and whose form is not chosen by timing.
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

    The engine calls in inference mode, whose tensors the compiler would tell from those of the capture.
    """

    def run(**inputs: Any) -> Any:
        with torch.inference_mode(False), torch.no_grad(), compiler_settings(batch_invariant=True):
            return model(**{name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()})

    return run


def compiled_model(model: nn.Module) -> Callable[..., Any]:
    """The model as one compiled graph for any number of tokens >= 2. Call it first inside `compiler_settings`."""
    return torch.compile(model, fullgraph=True, dynamic=True)


class HeadPasses:
    """The greedy passes of a head as plain functions of tensors; attention goes through `channel`."""

    def __init__(self, head: Head) -> None:
        self.head = head
        self.channel = Channel()

    def carrying(self, attend: Attend) -> AbstractContextManager[None]:
        """Serve the passes' attention with `attend`, for a while."""
        return self.channel.carrying(lambda layer, query, key, value, sinks: attend(layer, query, key, value))

    def first(
        self, tapped: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, last_row: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """tapped [T', A·Ht], token_ids, positions [T'], last_row [R] -> (block outputs [R, H], target ids [R])."""
        x = self._forward(token_ids, self.head.fuse(tapped), positions)
        return self._choose(x.index_select(0, last_row))

    def step(
        self, x: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [R, H] of the step before, token_ids, positions [R] -> (block outputs [R, H], target ids [R])."""
        return self._choose(self._forward(token_ids, self.head.feedback(x), positions))

    def _forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.head.forward(token_ids, hidden, positions, self._attend)

    def _choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.head.to_target_ids(greedy_ids(self.head.logits(x)))

    def _attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return opaque_attend(query, key, value, None, self.channel.number, layer)


class EaglePasses(HeadPasses):
    """The same for a head that can leave out what nobody reads."""

    def __init__(self, head: Eagle3Head) -> None:
        super().__init__(head)
        self._eagle = head

    def first(
        self, tapped: torch.Tensor, token_ids: torch.Tensor, positions: torch.Tensor, last_row: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `HeadPasses.first`. Only the keys and values of the other rows are needed."""
        return self._choose(
            self._eagle.forward(token_ids, self._eagle.fuse(tapped), positions, self._attend, rows=last_row)
        )


class MtpPasses(HeadPasses):
    """The same for a module whose block is a transformers layer, with the attention port that such layers call."""

    def __init__(self, head: MtpHead) -> None:
        super().__init__(head)
        self._module = head

    def carrying(self, attend: Attend) -> AbstractContextManager[None]:
        """See `HeadPasses.carrying`."""
        return self._module.attending(attend)

    def _forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._module.run_block(token_ids, hidden, positions)
