"""torch.compile of target and head: the compiler's settings, and the passes of a head as functions of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import _config as size_config

from attention.hf.custom_op import Channel, opaque_attend
from drafters.base import Attend, Head
from drafters.eagle3.head import Eagle3Head
from drafters.mtp.head import MtpHead
from specdec.compiler.passes import Rewriting
from specdec.errors import SpecdecError
from specdec.ops.argmax import greedy_ids
from specdec.target.alterations import Alterations


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
