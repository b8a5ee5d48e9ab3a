"""What heads of several families are made of: LayerSpec, and decoder layers with the checkpoints' parameter names."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention.errors import InvalidInputError
from attention.spec import AttentionSpec
from drafters.base import Layers
from drafters.checkpoints.config_fields import HeadReport
from drafters.errors import HeadMismatchError
from drafters.loops.base import Attend
from drafters.rope import RopeSpec, Rotary, rotate
from drafters.vocab import check_offsets, ids_of

CosSin = tuple[Tensor, Tensor]


_MOST_SIZE = 2**24
"""Limit of each dimension: shapes are compared with the file's before any weight is made, and must be countable."""
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "target_hidden_size",
    "draft_vocab_size",
    "num_layers",
)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """The layers and vocabularies of a head, as its own checkpoint defines them; nothing here is taken over from the
    target by default.

    Attributes:
        hidden_size: H. intermediate_size: width of the MLP. vocab_size: V.
        num_heads, num_kv_heads, head_dim: Hq, Hkv, D.
        rms_norm_eps, rope: from the head's configuration.
        qkv_bias, o_bias, mlp_bias: biases of q, k and v, of the attention's output, of the MLP, in every layer.
            qk_norm: RMSNorm per head on q and k before RoPE.
        num_layers: decoder layers. windowed_layers, window: those whose queries see `window` positions only, their own
            included.
        target_hidden_size: Ht. draft_vocab_size: Vd.
        aux_layers: layers of the aux hidden states, ascending (b: the state after b layers), or (FINAL_NORM,) for the
            last state.
        own_embed, own_lm_head: the head brings its own; otherwise the target's is shared.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-5
    rope: RopeSpec = field(default_factory=RopeSpec)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_layers: int = 1
    windowed_layers: Layers = ()
    window: int | None = None
    target_hidden_size: int
    draft_vocab_size: int
    aux_layers: Layers
    own_embed: bool = False
    own_lm_head: bool = True

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """The requirements of each attention layer of the head on a kernel."""
        dim = self.head_dim
        full = AttentionSpec(self.num_heads, self.num_kv_heads, dim, dim, scale=dim**-0.5)
        near = replace(full, window=self.window)
        return tuple(near if layer in self.windowed_layers else full for layer in range(self.num_layers))

    @property
    def aux_size(self) -> int:
        """Width of the concatenated aux hidden states, A·Ht."""
        return len(self.aux_layers) * self.target_hidden_size

    def check_layers(self, kind: str) -> None:
        """Check sizes and layers; kind: of the head, for messages. Raises InvalidInputError."""
        for name in _SIZES:
            if not 1 <= (size := getattr(self, name)) <= _MOST_SIZE:
                raise InvalidInputError(f"{name} of an {kind} head must be 1 … {_MOST_SIZE:,}, not {size:,}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise InvalidInputError(
                f"{self.num_heads} query heads, {self.num_kv_heads} key heads, head_dim {self.head_dim}: "
                "query heads must be a multiple of key heads, and head_dim even"
            )
        layers, window = self.windowed_layers, self.window
        if any(not 0 <= n < self.num_layers for n in layers) or (layers and (window is None or window < 1)):
            raise InvalidInputError(
                f"a head of {self.num_layers} layer(s) with a sliding window of {window} positions in layers "
                f"{list(layers)}: give layers that it has, and a window of at least 1"
            )

    def check_vocabulary(self) -> None:
        """Raises InvalidInputError: a draft vocabulary or widths that need tensors of the head's own."""
        if self.draft_vocab_size > self.vocab_size:
            raise InvalidInputError(f"draft vocabulary {self.draft_vocab_size} exceeds the target's {self.vocab_size}")
        if not self.own_embed and self.hidden_size != self.target_hidden_size:
            raise InvalidInputError(
                f"a head of width {self.hidden_size} on a target of width {self.target_hidden_size} "
                "needs its own embed_tokens"
            )


class Attention(nn.Module):
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
        norm = partial(nn.RMSNorm, spec.head_dim, eps=spec.rms_norm_eps) if spec.qk_norm else nn.Identity
        self.q_norm, self.k_norm = norm(), norm()

    def forward(self, y: Tensor, cos_sin: CosSin, attend: Attend, rows: Tensor | None) -> Tensor:
        """y [T, input size] -> [T, H], or [R, H] of the selected rows [R] int64."""
        query = self.q_norm(self.q_proj(y).unflatten(-1, (self.num_heads, self.head_dim)))
        key, value = self._key_and_value(y)
        rotated = rotate(torch.cat((query, key), dim=1), *cos_sin)  # [T, Hq+Hkv, D]
        query, key = rotated.split((self.num_heads, self.num_kv_heads), dim=1)
        attended = attend(self.index, query, key, value).flatten(1)
        return self.o_proj(attended if rows is None else attended.index_select(0, rows))

    def key_and_value(self, y: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor]:
        """y [T, input size] -> key after RoPE, value [T, Hkv, D]."""
        key, value = self._key_and_value(y)
        return rotate(key, *cos_sin), value

    def _key_and_value(self, y: Tensor) -> tuple[Tensor, Tensor]:
        key = self.k_norm(self.k_proj(y).unflatten(-1, (self.num_kv_heads, self.head_dim)))
        return key, self.v_proj(y).unflatten(-1, (self.num_kv_heads, self.head_dim))


class GatedMLP(nn.Module):
    """Gated MLP with SiLU."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def norm_of(spec: LayerSpec) -> nn.RMSNorm:
    """An RMSNorm over the hidden size."""
    return nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)


class PlainLayer(nn.Module):
    """A further layer of a deeper head: an ordinary pre-norm decoder layer."""

    def __init__(self, spec: LayerSpec, index: int, first_norm: bool = True) -> None:
        """first_norm: False for a layer that reads its input as it is (the first of an EAGLE-1 head)."""
        super().__init__()
        self.input_layernorm = norm_of(spec) if first_norm else nn.Identity()
        self.self_attn = Attention(spec, index, input_size=spec.hidden_size)
        self.post_attention_layernorm = norm_of(spec)
        self.mlp = GatedMLP(spec)

    def forward(self, x: Tensor, cos_sin: CosSin, attend: Attend, rows: Tensor | None) -> Tensor:
        """[T, H] -> [T, H], or [R, H] of the selected rows [R] int64."""
        residual = x if rows is None else x.index_select(0, rows)
        x = residual + self.self_attn(self.input_layernorm(x), cos_sin, attend, rows)
        return x + self.mlp(self.post_attention_layernorm(x))


class SharingHead(nn.Module):
    """A head that shares the target's embedding and lm_head, or brings its own, and its draft vocabulary.

    The target's tensors are no parameters, are not copied and do not appear in the state dict.
    """

    target_embedding: Tensor | None
    target_lm_head: Tensor | None
    target_ids: Tensor

    def __init__(
        self, spec: LayerSpec, target_embedding: Tensor, target_lm_head: Tensor | None, d2t: Tensor | None
    ) -> None:
        """Share; subclasses build the modules.

        Args:
            spec: the head.
            target_embedding: [V, Ht] the target's input embedding (not read when `spec.own_embed`).
            target_lm_head: [Vd, H], needed when not `spec.own_lm_head`.
            d2t: [Vd] int64 offsets; None when Vd = V.

        Raises:
            HeadMismatchError: the target's tensors do not fit the head.
            InvalidInputError: `d2t` is missing or no valid map.
        """
        super().__init__()
        self.spec = spec
        self.aux_layers = spec.aux_layers
        self.hidden_size = spec.hidden_size
        self.draft_vocab_size = spec.draft_vocab_size
        self.attention_specs = spec.attention_specs
        self.checkpoint_report: HeadReport | None = None
        self._share_target(target_embedding, target_lm_head)
        self._set_vocabulary(d2t, target_embedding.device)
        self.rotary = Rotary(spec.rope, spec.head_dim, target_embedding.device)

    def _share_target(self, embedding: Tensor, lm_head: Tensor | None) -> None:
        spec = self.spec
        if not spec.own_embed:
            check_shape("embedding", embedding, spec.vocab_size, spec.hidden_size)
        if not spec.own_lm_head:
            if lm_head is None:
                raise InvalidInputError("this head has no lm_head of its own: pass the target's lm_head weight")
            check_shape("lm_head", lm_head, spec.draft_vocab_size, spec.hidden_size)
        # Not persistent: they are the target's, so they are no part of the head's checkpoint.
        self.register_buffer("target_embedding", None if spec.own_embed else embedding.detach(), persistent=False)
        shared_lm_head = None if spec.own_lm_head or lm_head is None else lm_head.detach()
        self.register_buffer("target_lm_head", shared_lm_head, persistent=False)

    def _set_vocabulary(self, d2t: Tensor | None, device: torch.device) -> None:
        spec = self.spec
        if d2t is None and spec.draft_vocab_size != spec.vocab_size:
            raise InvalidInputError(
                f"a head of {spec.draft_vocab_size} draft tokens for a vocabulary of {spec.vocab_size} needs d2t"
            )
        offsets = torch.zeros(spec.vocab_size, dtype=torch.int64) if d2t is None else d2t.detach().long()
        if offsets.shape != (spec.draft_vocab_size,):
            raise InvalidInputError(f"d2t has shape {list(offsets.shape)}, the head asks for [{spec.draft_vocab_size}]")
        check_offsets(offsets, spec.vocab_size)
        self.register_buffer("target_ids", ids_of(offsets).to(device), persistent=False)

    def build_vocabulary(self) -> None:
        """Make the embedding and lm_head that the checkpoint brings."""
        spec = self.spec
        if spec.own_embed:
            self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        if spec.own_lm_head:
            self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int64 target-vocabulary ids -> [T, H]."""
        table = self.target_embedding if self.target_embedding is not None else self.embed_tokens.weight
        return F.embedding(token_ids, table)

    def read(self, x: Tensor) -> Tensor:
        """[R, H] -> [R, Vd] logits of lm_head."""
        weight = self.target_lm_head if self.target_lm_head is not None else self.lm_head.weight
        return F.linear(x.to(weight.dtype), weight)

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft-vocabulary ids (any shape, int64) -> target-vocabulary ids."""
        return draft_ids if self.draft_vocab_size == self.spec.vocab_size else self.target_ids[draft_ids]


def check_shape(name: str, weight: Tensor, rows: int, columns: int) -> None:
    """Refuse a tensor of the target that does not fit the head. Raises HeadMismatchError, which names both shapes."""
    if tuple(weight.shape) != (rows, columns):
        raise HeadMismatchError(
            f"the target's {name} has {weight.shape[0]} rows of width {weight.shape[1]}, "
            f"the head was made for {rows} rows of width {columns}"
        )
