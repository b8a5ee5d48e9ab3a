"""Several multi-token-prediction modules (M > 1) as one drafter: module j mod M makes draft j+1.

Which rows each module runs, and why one vector per request and module is carried from round to round: see
`drafters.loops.modules.index`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from attention.batch.metadata import CommonAttentionMetadata
from attention.runner import GroupRunner
from drafters.base import Attend
from drafters.errors import HeadLoadError
from drafters.loops.chain.run import Choose, Draft
from drafters.mtp.head import MtpHead


class MtpStack(nn.Module):
    """M modules over one target. Layer m of their cache group is module m's.

    Taken as a plain `drafters.base.Head` it is its first module, which drafts by itself as well.
    """

    def __init__(self, modules: Sequence[MtpHead]) -> None:
        """Raises HeadLoadError for fewer than two modules: one is a head by itself."""
        super().__init__()
        if len(modules) < 2:
            raise HeadLoadError(f"{len(modules)} module: a stack has two or more")
        self.heads = nn.ModuleList(modules)
        self.attention_specs = tuple(key for module in modules for key in module.attention_specs)
        self.taps = modules[0].taps
        self.hidden_size = modules[0].hidden_size
        self.draft_vocab_size = modules[0].draft_vocab_size

    @property
    def num_modules(self) -> int:
        """M."""
        return len(self.heads)

    def module(self, step: int) -> MtpHead:
        """The module that makes draft step+1."""
        return self.heads[step % len(self.heads)]  # type: ignore[return-value]

    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        """[T, H] target states after the final norm: taken as they are."""
        return tapped

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


@dataclass(frozen=True)
class ModulePass:
    """One module's part of a draft prefill over B' requests.

    Attributes:
        token_ids: [T_m] int64.
        sources: [T_m] int64; for module 0 rows of the target's aux hidden states, for others see `ModuleRows.sources`.
        last_row: [B'] int64, each request's last row.
        metadata: attention of the pass; requests without rows are not in it.
    """

    token_ids: torch.Tensor
    sources: torch.Tensor
    last_row: torch.Tensor
    metadata: CommonAttentionMetadata


def first_passes(
    stack: MtpStack, runner: GroupRunner, tapped: torch.Tensor, passes: Sequence[ModulePass], carried: torch.Tensor
) -> torch.Tensor:
    """Every module's draft prefill, over the rows whose tokens are now committed; it overwrites earlier draft steps.

    Args:
        tapped: [T, H] states of the target's last forward after its final norm.
        passes: of modules 0 … M-1.
        carried: [M, B', H], what the requests' last draft prefill returned; finite, and unread where a request starts.

    Returns:
        [M, B', H] each module's output at each request's last committed row: the draft steps start from it, and the
        next round carries it. Without meaning where a request has no such row yet.
    """
    states, last = tapped, []
    for m, each in enumerate(passes):
        module = stack.module(m)
        if m > 0:
            states = stack.module(m - 1).feedback(torch.cat([carried[m - 1], states]))
        hidden = states.index_select(0, each.sources)  # [T_m, H]
        if not len(hidden):  # every request is too short for this module, and attention takes no empty batch
            states = hidden
            last.append(carried[m])
            continue
        attend = _module_attend(runner, each.metadata, m)
        states = module.forward(each.token_ids, hidden, each.metadata.positions, attend)
        last.append(states.index_select(0, each.last_row))
    return torch.stack(last)


def draft_modules(
    stack: MtpStack,
    runner: GroupRunner,
    last: torch.Tensor,
    steps: Sequence[CommonAttentionMetadata],
    choose: Choose,
) -> Draft:
    """Drafts 1 … n of R requests.

    Args:
        last: [M, R, H] what `first_passes` returned of the drafting requests.
        steps: attention of drafts 2 … n, see `drafters.loops.modules.index.module_step`.
        choose: picks the draft token from logits.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.2 (the recursion); vllm-project/vllm, module index = step mod M.
    """
    count, hidden_size = last.shape[1:]
    ids, probs = choose(0, stack.module(0).logits(last[0]))
    chosen, token_ids = [probs], [ids]
    block = last.new_empty(count, 0, hidden_size)
    for step, metadata in enumerate(steps, 1):
        module, before = stack.module(step), stack.module(step - 1)
        if step <= stack.num_modules:
            block = torch.cat([last[step - 1][:, None], block], 1)
        width = block.shape[1]
        tokens = torch.stack(token_ids[step - width :], 1)  # [R, width]
        attend = _module_attend(runner, metadata, step % stack.num_modules)
        hidden = before.feedback(block.flatten(0, 1))
        block = module.forward(tokens.flatten(), hidden, metadata.positions, attend).view(count, width, -1)
        ids, probs = choose(step, module.logits(block[:, -1]))
        chosen.append(probs)
        token_ids.append(ids)
    sampled = [p for p in chosen if p is not None]
    return Draft(torch.stack(token_ids, 1), torch.stack(sampled, 1) if sampled else None)


def _module_attend(runner: GroupRunner, metadata: CommonAttentionMetadata, module: int) -> Attend:
    """Attention of one module over its own layer."""
    planned = runner.plan(metadata)

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return runner.attend(planned, module + layer, query, key, value)

    return attend
