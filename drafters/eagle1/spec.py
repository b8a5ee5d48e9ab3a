"""Eagle1Spec: everything that decides the shape and the arithmetic of an EAGLE-1 head."""

from __future__ import annotations

from dataclasses import dataclass, field

from attention.errors import InvalidInputError
from attention.spec import AttentionSpec
from drafters.eagle3.spec import attention_specs, check_windows
from drafters.rope import RopeSpec


@dataclass(frozen=True)
class Eagle1Spec:
    """One EAGLE-1 (or EAGLE-2, which has the same weights) head, as its own checkpoint defines it.

    Attributes:
        hidden_size: H, the target's.
        intermediate_size: width of the head's MLP.
        num_heads, num_kv_heads, head_dim: Hq, Hkv, D.
        vocab_size: V.
        rms_norm_eps, rope: from the head's configuration.
        fc_bias: `fc` has a bias.
        first_norm: the first layer has a norm before its attention (the published heads have none).
        qkv_bias, o_bias, mlp_bias: biases of q, k and v, of the attention's output, of the MLP, in every layer.
        qk_norm: RMSNorm per head on q and k before RoPE.
        num_layers: decoder layers.
        windowed_layers, window: layers whose queries see `window` positions only, their own included.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-6
    rope: RopeSpec = field(default_factory=RopeSpec)
    fc_bias: bool = True
    first_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_layers: int = 1
    windowed_layers: tuple[int, ...] = ()
    window: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidInputError for sizes that contradict each other."""
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name} of an EAGLE-1 head must be at least 1, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise InvalidInputError(
                f"{self.num_heads} query heads, {self.num_kv_heads} key heads, head_dim {self.head_dim}: "
                "query heads must be a multiple of key heads, and head_dim even"
            )
        check_windows(self.windowed_layers, self.window, self.num_layers)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """What each attention layer of the head needs of a kernel."""
        return attention_specs(self)
