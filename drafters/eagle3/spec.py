"""Eagle3Spec and Eagle1Spec: everything that decides the shape and the arithmetic of an EAGLE head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attention.errors import InvalidInputError
from drafters.base import FINAL_NORM, Layers
from drafters.layer_spec import LayerSpec


@dataclass(frozen=True, kw_only=True)
class Eagle3Spec(LayerSpec):
    """One EAGLE-3 head. The first of its layers is the EAGLE-3 layer, further ones are plain pre-norm layers.

    Attributes:
        fc_bias: bias of `fc`.
        input_norm: one RMSNorm over the concatenated aux hidden states before `fc`; fc_norm: one for each of them.
        norm_before_residual: the residual is the normalised hidden state instead of the raw one.
        feedback: input of the next draft step, the block output or its final norm.
    """

    fc_bias: bool = False
    input_norm: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    feedback: Literal["pre_norm", "post_norm"] = "pre_norm"

    def __post_init__(self) -> None:
        """Raises InvalidInputError for sizes or choices that contradict each other."""
        self.check_layers("an EAGLE-3")
        self.check_vocabulary()
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
    def has_fc(self) -> bool:
        """Whether aux hidden states are fused by `fc` (no for a head on the target's last state)."""
        return self.aux_layers != (FINAL_NORM,)


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
        self.check_layers("an EAGLE-1")


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
