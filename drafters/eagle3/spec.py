"""Eagle3Spec and Eagle1Spec: everything that decides the shape and the arithmetic of an EAGLE head."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from attention.errors import InvalidInputError
from attention.spec import AttentionSpec
from drafters.base import FINAL_NORM, Layers
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
class Eagle3Spec:
    """One EAGLE-3 head, as its own checkpoint defines it; nothing here is taken over from the target by default.

    The first of its layers is the EAGLE-3 layer, further ones are plain pre-norm layers.

    Attributes:
        hidden_size: H. intermediate_size: width of the MLP. vocab_size: V.
        num_heads, num_kv_heads, head_dim: Hq, Hkv, D.
        rms_norm_eps, rope: from the head's configuration.
        fc_bias, qkv_bias, o_bias, mlp_bias: biases of `fc`; of q, k and v, of the attention's output, of the MLP, in
            every layer. qk_norm: RMSNorm per head on q and k before RoPE.
        num_layers: decoder layers. windowed_layers, window: those whose queries see `window` positions only, their own
            included.
        target_hidden_size: Ht. draft_vocab_size: Vd.
        aux_layers: layers of the aux hidden states, ascending (b: the state after b layers), or (FINAL_NORM,) for a
            head on the last state.
        input_norm: one RMSNorm over the concatenated aux hidden states before `fc`; fc_norm: one for each of them.
        norm_before_residual: the residual is the normalised hidden state instead of the raw one.
        feedback: input of the next draft step, the block output or its final norm.
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
    fc_bias: bool = False
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
    input_norm: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    feedback: Literal["pre_norm", "post_norm"] = "pre_norm"
    own_embed: bool = False
    own_lm_head: bool = True

    def __post_init__(self) -> None:
        """Raises InvalidInputError for sizes or choices that contradict each other."""
        self.check_layers("EAGLE-3")
        if self.draft_vocab_size > self.vocab_size:
            raise InvalidInputError(f"draft vocabulary {self.draft_vocab_size} exceeds the target's {self.vocab_size}")
        if not self.own_embed and self.hidden_size != self.target_hidden_size:
            raise InvalidInputError(
                f"a head of width {self.hidden_size} on a target of width {self.target_hidden_size} "
                "needs its own embed_tokens"
            )
        self._check_aux_layers()

    def _check_aux_layers(self) -> None:
        aux_layers = self.aux_layers
        if aux_layers == (FINAL_NORM,):
            if self.hidden_size != self.target_hidden_size:
                raise InvalidInputError("a head on the target's last state has no fc and so needs the target's width")
            if self.fc_bias or self.input_norm or self.fc_norm:
                raise InvalidInputError("a head on the target's last state has no fc and none of the norms before it")
            return
        if not aux_layers or min(aux_layers) < 0 or list(aux_layers) != sorted(set(aux_layers)):
            raise InvalidInputError(
                f"aux_layers must be ascending numbers >= 0 (or the final norm alone), not {aux_layers}"
            )

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """The requirements of each attention layer of the head on a kernel."""
        dim = self.head_dim
        full = AttentionSpec(self.num_heads, self.num_kv_heads, dim, dim, scale=dim**-0.5)
        near = replace(full, window=self.window)
        return tuple(near if layer in self.windowed_layers else full for layer in range(self.num_layers))

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

    @property
    def has_fc(self) -> bool:
        """Whether aux hidden states are fused by `fc` (no for a head on the target's last state)."""
        return self.aux_layers != (FINAL_NORM,)

    @property
    def aux_size(self) -> int:
        """Width of the concatenated aux hidden states, A·Ht."""
        return len(self.aux_layers) * self.target_hidden_size


@dataclass(frozen=True, kw_only=True)
class Eagle1Spec(Eagle3Spec):
    """One EAGLE-1 (or EAGLE-2) head, as its own checkpoint defines it. H is the target's, Vd is V.

    Attributes:
        first_norm: the first layer has a norm before its attention (the published heads have none).
    """

    aux_layers: Layers = (FINAL_NORM,)
    own_lm_head: bool = False
    fc_bias: bool = True
    first_norm: bool = False

    def __post_init__(self) -> None:
        """Raises InvalidInputError for sizes that contradict each other."""
        self.check_layers("EAGLE-1")


def default_aux_layers(num_layers: int) -> Layers:
    """Default aux layers, for a target of `num_layers` decoder layers.

    Raises:
        InvalidInputError: the target is too shallow for three different states.
    Source: SafeAILab/EAGLE, eagle/model/modeling_llama_kv.py (states on entry to layers 2, N//2 and N-3).
    """
    aux_layers = (2, num_layers // 2, num_layers - 3)
    if not aux_layers[0] < aux_layers[1] < aux_layers[2]:
        raise InvalidInputError(
            f"a target of {num_layers} layers has no default aux layers: 2, N//2, N-3 = {aux_layers} must ascend; "
            "choose them: --aux-layers 0,1,2 of `specdec train eagle3`; of a head that names none, head_overrides="
            '{"aux_layers": [0, 1, 2]}'
        )
    return aux_layers
