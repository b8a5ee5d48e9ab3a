"""Eagle3Head: the EAGLE-3 draft head and its decoder layer as modules with the checkpoint's parameter names.

Plain layers, and what a head shares with its target, are other families' too.
"""

from __future__ import annotations

from functools import partial
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention.errors import InvalidInputError
from drafters.base import FINAL_NORM
from drafters.checkpoints.config_fields import HeadReport
from drafters.eagle3.spec import Eagle1Spec, Eagle3Spec
from drafters.errors import HeadMismatchError
from drafters.layer_spec import LayerSpec
from drafters.loops.base import Attend, LoopSize
from drafters.loops.chain import ChainLoop
from drafters.loops.head_passes import EaglePasses
from drafters.rope import Rotary, rotate
from drafters.vocab import check_offsets, ids_of, offsets_of

CosSin = tuple[Tensor, Tensor]


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
        self.q_norm = norm()
        self.k_norm = norm()

    def forward(self, y: Tensor, cos_sin: CosSin, attend: Attend, rows: Tensor | None) -> Tensor:
        """y [T, input size] -> [T, H], or [R, H] of the selected rows [R] int64."""
        query = self.q_norm(self.q_proj(y).unflatten(-1, (self.num_heads, self.head_dim)))
        key, value = self.key_and_value(y)
        rotated = rotate(torch.cat((query, key), dim=1), *cos_sin)  # [T, Hq+Hkv, D]
        query, key = rotated.split((self.num_heads, self.num_kv_heads), dim=1)
        attended = attend(self.index, query, key, value).flatten(1)
        return self.o_proj(attended if rows is None else attended.index_select(0, rows))

    def key_and_value(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """y [T, input size] -> key before RoPE, value [T, Hkv, D]."""
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


class Eagle3Layer(nn.Module):
    """The first layer: attention over [embedding, hidden], so q, k and v read 2H.

    Source: SafeAILab/EAGLE, eagle/model/cnets.py (LlamaDecoderLayeremb); `norm_before_residual` from speculators.
    """

    def __init__(self, spec: Eagle3Spec) -> None:
        super().__init__()
        self.norm_before_residual = spec.norm_before_residual
        self.input_layernorm = norm_of(spec)
        self.hidden_norm = norm_of(spec)
        self.self_attn = Attention(spec, index=0, input_size=2 * spec.hidden_size)
        self.post_attention_layernorm = norm_of(spec)
        self.mlp = GatedMLP(spec)

    def forward(self, embedded: Tensor, hidden: Tensor, cos_sin: CosSin, attend: Attend, rows: Tensor | None) -> Tensor:
        """embedded, hidden [T, H] -> block output [T, H], or [R, H] of the selected rows [R] int64."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        y = torch.cat((self.input_layernorm(embedded), normed), dim=-1)  # [T, 2H], embedding first
        residual = residual if rows is None else residual.index_select(0, rows)
        x = residual + self.self_attn(y, cos_sin, attend, rows)
        return x + self.mlp(self.post_attention_layernorm(x))


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
        self,
        spec: LayerSpec,
        target_embedding: Tensor,
        target_lm_head: Tensor | None = None,
        d2t: Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Build a head with fresh float32 weights.

        Args:
            spec: the head.
            target_embedding: [V, Ht] the target's input embedding (not read when `spec.own_embed`).
            target_lm_head: [Vd, H], needed when not `spec.own_lm_head`.
            d2t: [Vd] int64 offsets; None when Vd = V.
            device: for the fresh weights; default: the device of `target_embedding`. "meta" allocates none, for
                `load_state_dict(..., assign=True)`.

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
        if not spec.own_embed:
            check_shape("embedding", target_embedding, spec.vocab_size, spec.hidden_size)
        if not spec.own_lm_head:
            if target_lm_head is None:
                raise InvalidInputError("this head has no lm_head of its own: pass the target's lm_head weight")
            check_shape("lm_head", target_lm_head, spec.draft_vocab_size, spec.hidden_size)
        # Not persistent: they are the target's, so they are no part of the head's checkpoint.
        shared_embedding = None if spec.own_embed else target_embedding.detach()
        self.register_buffer("target_embedding", shared_embedding, persistent=False)
        shared_lm_head = None if spec.own_lm_head or target_lm_head is None else target_lm_head.detach()
        self.register_buffer("target_lm_head", shared_lm_head, persistent=False)
        if d2t is None and spec.draft_vocab_size != spec.vocab_size:
            raise InvalidInputError(
                f"a head of {spec.draft_vocab_size} draft tokens for a vocabulary of {spec.vocab_size} needs d2t"
            )
        offsets = torch.zeros(spec.vocab_size, dtype=torch.int64) if d2t is None else d2t.detach().long()
        if offsets.shape != (spec.draft_vocab_size,):
            raise InvalidInputError(f"d2t has shape {list(offsets.shape)}, the head asks for [{spec.draft_vocab_size}]")
        check_offsets(offsets, spec.vocab_size)
        self.register_buffer("target_ids", ids_of(offsets).to(target_embedding.device), persistent=False)
        self.rotary = Rotary(spec.rope, spec.head_dim, target_embedding.device)
        with device or target_embedding.device:
            self.build_modules()

    def build_modules(self) -> None:
        """Make the modules of the checkpoint."""
        raise NotImplementedError

    def build_embedding(self) -> None:
        """Make the embedding that the checkpoint brings, before all other modules."""
        if self.spec.own_embed:
            self.embed_tokens = nn.Embedding(self.spec.vocab_size, self.spec.hidden_size)

    def build_lm_head(self) -> None:
        """Make the lm_head that the checkpoint brings, after all other modules."""
        if self.spec.own_lm_head:
            self.lm_head = nn.Linear(self.spec.hidden_size, self.spec.draft_vocab_size, bias=False)

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

    def reread(self, spec: LayerSpec, embedding: Tensor | None = None) -> Self:
        """This head's own tensors under another spec of the same shapes; nothing is copied.

        embedding: [V, H] of the target, to share in place of the head's.
        """
        state = self.state_dict()
        if embedding is None:
            embedding = self.embed_tokens.weight if self.target_embedding is None else self.target_embedding
        else:
            state.pop("embed_tokens.weight", None)
        # On "meta" no memory is allocated, and assign=True puts this head's tensors in place of the meta ones.
        other = type(self)(spec, embedding, self.target_lm_head, offsets_of(self.target_ids), torch.device("meta"))
        other.load_state_dict(state, assign=True)
        return other.eval().requires_grad_(False)


class Eagle3Head(SharingHead):
    """An EAGLE-3 head; satisfies `drafters.base.Head` and `drafters.checkpoints.config_fields.Reported`.

    Parameters carry the checkpoint's names.
    """

    spec: Eagle3Spec

    def build_modules(self) -> None:
        """Make the modules of the checkpoint."""
        spec = self.spec
        self.build_embedding()
        if spec.has_fc:
            self.fc = nn.Linear(spec.aux_size, spec.hidden_size, bias=spec.fc_bias)
        if spec.input_norm:
            self.input_norm = nn.RMSNorm(spec.aux_size, eps=spec.rms_norm_eps)
        if spec.fc_norm:
            norms = (nn.RMSNorm(spec.target_hidden_size, eps=spec.rms_norm_eps) for _ in spec.aux_layers)
            self.fc_norm = nn.ModuleList(norms)
        self.midlayer = Eagle3Layer(spec)
        self.layers = nn.ModuleDict({str(index): PlainLayer(spec, index) for index in range(1, spec.num_layers)})
        self.norm = norm_of(spec)
        self.build_lm_head()

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """[T, A·Ht] aux hidden states -> [T, H] input of step 1: norms if any, then `fc`."""
        if self.aux_layers == (FINAL_NORM,):
            return aux_hidden_states
        if self.spec.input_norm:
            aux_hidden_states = self.input_norm(aux_hidden_states)
        if self.spec.fc_norm:
            chunks = aux_hidden_states.split(self.spec.target_hidden_size, dim=-1)
            aux_hidden_states = torch.cat(
                [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1
            )
        return self.fc(aux_hidden_states)

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        rows: Tensor | None = None,
    ) -> Tensor:
        """One pass over T rows.

        Args:
            token_ids: [T] int64 target-vocabulary ids, the token at position p+1.
            hidden: [T, H], `fuse`d aux hidden states at step 1, `feedback` afterwards.
            positions: [T] integers, p.
            attend: remembers K and V and attends.
            rows: [R] int64, rows whose output is computed, by default all. Other rows end at the last attention.

        Returns:
            The block output [T, H] or [R, H], before the final norm.
        """
        embedded = self.embed(token_ids).to(hidden.dtype)  # [T, H]
        cos_sin = self.rotary(positions)
        further = list(self.layers.values())
        x = self.midlayer(embedded, hidden, cos_sin, attend, None if further else rows)
        for layer in further:
            x = layer(x, cos_sin, attend, rows if layer is further[-1] else None)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[R, H] block outputs -> [R, Vd] draft logits."""
        return self.read(self.norm(x))

    def feedback(self, x: Tensor) -> Tensor:
        """[R, H] block outputs -> [R, H] hidden state of the next draft step."""
        return x if self.spec.feedback == "pre_norm" else self.norm(x)

    def draft_loop(self, limits: LoopSize) -> ChainLoop:
        """A chain."""
        return ChainLoop(self, EaglePasses)


class Eagle1Head(Eagle3Head):
    """An EAGLE-1 head.

    It predicts the target's next state after the final norm, so the target's lm_head reads its output as it is: there
    is no norm of its own. `fc` reads [embedding, hidden], and all layers are plain.

    Source: SafeAILab/EAGLE, eagle/model/cnets1.py.
    """

    spec: Eagle1Spec

    def build_modules(self) -> None:
        spec = self.spec
        self.fc = nn.Linear(2 * spec.hidden_size, spec.hidden_size, bias=spec.fc_bias)
        norms = (spec.first_norm, *(True for _ in range(1, spec.num_layers)))
        self.layers = nn.ModuleDict({str(index): PlainLayer(spec, index, norm) for index, norm in enumerate(norms)})
        self.norm = nn.Identity()  # type: ignore[assignment]

    def midlayer(  # type: ignore[override]
        self, embedded: Tensor, hidden: Tensor, cos_sin: CosSin, attend: Attend, rows: Tensor | None
    ) -> Tensor:
        """In place of EAGLE-3's first layer, which is a module: embedded, hidden [T, H] -> [T, H]."""
        return self.fc(torch.cat((embedded, hidden), dim=-1))  # embedding first


def check_shape(name: str, weight: Tensor, rows: int, columns: int) -> None:
    """Refuse a tensor of the target that does not fit the head. Raises HeadMismatchError, which names both shapes."""
    if tuple(weight.shape) != (rows, columns):
        raise HeadMismatchError(
            f"the target's {name} has {weight.shape[0]} rows of width {weight.shape[1]}, "
            f"the head was made for {rows} rows of width {columns}"
        )
