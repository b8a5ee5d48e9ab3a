"""Decoder layers of EAGLE heads, with their checkpoints' parameter names."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from drafters.attend import Attend
from drafters.eagle3.spec import Attends, Eagle3Spec
from drafters.rope import rotate

CosSin = tuple[torch.Tensor, torch.Tensor]


class LayerSpec(Attends, Protocol):
    """What decides the shape of a decoder layer; a head of any EAGLE has it."""

    @property
    def hidden_size(self) -> int:
        """H."""

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""

    @property
    def rms_norm_eps(self) -> float:
        """Of all norms."""

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases."""

    @property
    def o_bias(self) -> bool:
        """Whether the attention's output has one."""

    @property
    def mlp_bias(self) -> bool:
        """Whether the MLP has them."""

    @property
    def qk_norm(self) -> bool:
        """Whether q and k are normalised per head before RoPE."""


class Eagle3Attention(nn.Module):
    """Self-attention with RoPE; where K and V live is the caller's business (`Attend`)."""

    def __init__(self, spec: LayerSpec, index: int, input_size: int) -> None:
        super().__init__()
        self.index = index
        self.head_dim = spec.head_dim
        self.num_heads = spec.num_heads
        self.num_kv_heads = spec.num_kv_heads
        kv_size = spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(input_size, spec.num_heads * spec.head_dim, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(input_size, kv_size, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(input_size, kv_size, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, spec.hidden_size, bias=spec.o_bias)
        self.q_norm = nn.RMSNorm(spec.head_dim, eps=spec.rms_norm_eps) if spec.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(spec.head_dim, eps=spec.rms_norm_eps) if spec.qk_norm else nn.Identity()

    def forward(self, y: torch.Tensor, cos_sin: CosSin, attend: Attend, rows: torch.Tensor | None) -> torch.Tensor:
        """y [T, input size] -> [T, H], or [R, H] of the selected rows [R] int64."""
        query = self.q_norm(self.q_proj(y).unflatten(-1, (self.num_heads, self.head_dim)))
        key = self.k_norm(self.k_proj(y).unflatten(-1, (self.num_kv_heads, self.head_dim)))
        value = self.v_proj(y).unflatten(-1, (self.num_kv_heads, self.head_dim))
        rotated = rotate(torch.cat((query, key), dim=1), *cos_sin)  # [T, Hq+Hkv, D]
        query, key = rotated.split((self.num_heads, self.num_kv_heads), dim=1)
        return self.o_proj(only(rows, attend(self.index, query, key, value).flatten(1)))


class Eagle3MLP(nn.Module):
    """Gated MLP with SiLU."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Eagle3Layer(nn.Module):
    """The first layer: attention over [embedding, hidden], so q, k and v read 2H.

    Source: SafeAILab/EAGLE, eagle/model/cnets.py (LlamaDecoderLayeremb); `norm_before_residual` from speculators.
    """

    def __init__(self, spec: Eagle3Spec) -> None:
        super().__init__()
        self.norm_before_residual = spec.norm_before_residual
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.self_attn = Eagle3Attention(spec, index=0, input_size=2 * spec.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.mlp = Eagle3MLP(spec)

    def forward(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        cos_sin: CosSin,
        attend: Attend,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """embedded, hidden [T, H] -> block output [T, H], or [R, H] of the selected rows [R] int64."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        y = torch.cat((self.input_layernorm(embedded), normed), dim=-1)  # [T, 2H], embedding first
        x = only(rows, residual) + self.self_attn(y, cos_sin, attend, rows)
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainLayer(nn.Module):
    """A further layer of a deeper head: an ordinary pre-norm decoder layer."""

    def __init__(self, spec: LayerSpec, index: int, first_norm: bool = True) -> None:
        """first_norm: False for a layer that reads its input as it is (the first of an EAGLE-1 head)."""
        super().__init__()
        norm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps) if first_norm else nn.Identity()
        self.input_layernorm = norm
        self.self_attn = Eagle3Attention(spec, index, input_size=spec.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.mlp = Eagle3MLP(spec)

    def forward(
        self, x: torch.Tensor, cos_sin: CosSin, attend: Attend, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, H] -> [T, H], or [R, H] of the selected rows [R] int64."""
        x = only(rows, x) + self.self_attn(self.input_layernorm(x), cos_sin, attend, rows)
        return x + self.mlp(self.post_attention_layernorm(x))


def only(rows: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """The selected rows [R] int64 of x [T, ...], or all of them."""
    return x if rows is None else x.index_select(0, rows)
