"""Several multi-token-prediction modules (M > 1) as one drafter: module j mod M makes draft j+1.

Which rows each module runs, and why one vector per request and module is carried from round to round: see
`drafters.loops.modules.index`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from drafters.base import Attend
from drafters.checkpoints.config_fields import HeadReport
from drafters.errors import HeadLoadError
from drafters.loops.base import LoopSize
from drafters.loops.chain.run import ChainLoop
from drafters.loops.modules.passes import ModulePasses
from drafters.loops.modules.run import ModuleLoop
from drafters.mtp.convention_check import check_convention
from drafters.mtp.head import MtpHead


class MtpStack(nn.Module):
    """M modules over one target. Layer m of their cache group is module m's.

    Taken as a plain `drafters.base.Head` it is its first module, which drafts by itself as well.
    """

    def __init__(self, modules: Sequence[MtpHead]) -> None:
        """Raises HeadLoadError for fewer than two modules, or for one with several attention layers."""
        super().__init__()
        if len(modules) < 2:
            raise HeadLoadError(f"{len(modules)} module: a stack has two or more; one is a head by itself")
        layers = [len(module.attention_specs) for module in modules]
        if set(layers) != {1}:
            raise HeadLoadError(
                f"{len(modules)} multi-token-prediction modules with {layers} attention layers each: modules that take "
                "turns have one each"
            )
        self.heads = nn.ModuleList(modules)
        self.checkpoint_report: HeadReport | None = None
        self.attention_specs = tuple(key for module in modules for key in module.attention_specs)
        self.aux_layers = modules[0].aux_layers
        self.hidden_size = modules[0].hidden_size
        self.draft_vocab_size = modules[0].draft_vocab_size

    @property
    def num_modules(self) -> int:
        """M."""
        return len(self.heads)

    def module(self, step: int) -> MtpHead:
        """The module that makes draft step+1."""
        return self.heads[step % len(self.heads)]  # type: ignore[return-value]

    def passes(self, num_modules: int) -> tuple[ModulePasses, ...]:
        """See `drafters.loops.modules.run.ModuleStack`."""
        taking_turns = self.mtp_modules[:num_modules]
        return tuple(ModulePasses(own, taking_turns[m - 1]) for m, own in enumerate(taking_turns))

    def fuse(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, H] target states after the final norm: taken as they are."""
        return aux_hidden_states

    def forward(
        self, token_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """The first module's pass; see `MtpHead.forward`."""
        return self.module(0).forward(token_ids, hidden, positions, attend)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The first module's logits."""
        return self.module(0).logits(x)

    def feedback(self, x: torch.Tensor) -> torch.Tensor:
        """The first module's feedback."""
        return self.module(0).feedback(x)

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids are target ids."""
        return draft_ids

    @property
    def mtp_modules(self) -> tuple[MtpHead, ...]:
        """Modules 0 … M-1."""
        return tuple(self.heads)  # type: ignore[arg-type]

    def draft_loop(self, limits: LoopSize) -> ModuleLoop | ChainLoop:
        """The modules in turn, as many as there are drafts; of one draft, the chain of the first."""
        return ModuleLoop(self, limits) if limits.drafts > 1 else self.module(0).draft_loop(limits)

    def check_convention(self, token_ids: torch.Tensor, states: torch.Tensor, num_drafts: int) -> None:
        """See `drafters.base.HasInputConvention`."""
        check_convention(self, token_ids, states, num_drafts)
