"""LayerSpec: the layers and vocabularies of a head, for several families."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from attention.errors import InvalidInputError
from attention.spec import AttentionSpec
from drafters.base import Layers
from drafters.rope import RopeSpec

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
                raise InvalidInputError(f"{name} of {kind} head must be 1 … {_MOST_SIZE:,}, not {size:,}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise InvalidInputError(
                f"{self.num_heads} query heads, {self.num_kv_heads} key heads, head_dim {self.head_dim}: "
                "query heads must be a multiple of key heads, and head_dim even"
            )
        layers = self.windowed_layers
        window = self.window
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
