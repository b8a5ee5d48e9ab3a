"""Eagle1Head: the EAGLE-1 draft head as an nn.Module with its checkpoint's parameter names."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from drafters.base import FINAL_NORM, Attend
from drafters.checkpoints.config_fields import HeadReport
from drafters.eagle1.spec import Eagle1Spec
from drafters.eagle3.head import check_shape
from drafters.eagle3.layers import PlainLayer
from drafters.loops.base import LoopSize
from drafters.loops.chain.passes import EaglePasses
from drafters.loops.chain.run import ChainLoop
from drafters.rope import Rotary


class Eagle1Head(nn.Module):
    """An EAGLE-1 head; satisfies `drafters.base.Head` and `drafters.checkpoints.config_fields.Reported`.

    It predicts the target's next state after the final norm, so the target's lm_head reads its output as it is. The
    target's embedding and lm_head are shared tensors: they are no parameters and do not appear in the state dict.

    Source: SafeAILab/EAGLE, eagle/model/cnets1.py.
    """

    target_embedding: torch.Tensor
    target_lm_head: torch.Tensor

    def __init__(
        self,
        spec: Eagle1Spec,
        target_embedding: torch.Tensor,
        target_lm_head: torch.Tensor,
        device: torch.device | None = None,
    ) -> None:
        """Build a head with fresh float32 weights.

        Args:
            target_embedding, target_lm_head: [V, H].
            device: of the fresh weights; by default that of `target_embedding`. "meta" makes none.

        Raises:
            HeadMismatchError: the target's tensors do not fit the head.
        """
        super().__init__()
        self.spec = spec
        self.aux_layers: tuple[int, ...] = (FINAL_NORM,)
        self.hidden_size = spec.hidden_size
        self.draft_vocab_size = spec.vocab_size
        self.attention_specs = spec.attention_specs
        self.checkpoint_report: HeadReport | None = None
        check_shape("embedding", target_embedding, spec.vocab_size, spec.hidden_size)
        check_shape("lm_head", target_lm_head, spec.vocab_size, spec.hidden_size)
        self.register_buffer("target_embedding", target_embedding.detach(), persistent=False)
        self.register_buffer("target_lm_head", target_lm_head.detach(), persistent=False)
        self.rotary = Rotary(spec.rope, spec.head_dim, target_embedding.device)
        with device or target_embedding.device:
            self.fc = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=spec.fc_bias)
            norms = (spec.first_norm, *(True for _ in range(1, spec.num_layers)))
            self.layers = nn.ModuleList(PlainLayer(spec, index, norm) for index, norm in enumerate(norms))

    def fuse(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, H], the target's states after its final norm, as they are."""
        return aux_hidden_states

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One pass over T rows; see `drafters.eagle3.head.Eagle3Head.forward`."""
        embedded = F.embedding(token_ids, self.target_embedding).to(hidden.dtype)  # [T, H]
        x = self.fc(torch.cat((embedded, hidden), dim=-1))  # embedding first
        cos_sin = self.rotary(positions)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            x = layer(x, cos_sin, attend, rows if index == last else None)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[R, H] block outputs -> [R, V] draft logits."""
        return F.linear(x.to(self.target_lm_head.dtype), self.target_lm_head)

    def feedback(self, x: torch.Tensor) -> torch.Tensor:
        """[R, H] block outputs -> [R, H] hidden state of the next draft step: the same."""
        return x

    def to_target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft-vocabulary ids (any shape, int64): the target's."""
        return draft_ids

    def draft_loop(self, limits: LoopSize) -> ChainLoop:
        """A chain."""
        return ChainLoop(self, partial(EaglePasses, self))
