"""gpt-oss's experts in MXFP4 as they are published: 4 bits stay in memory, activations keep their 16 bits.

transformers needs kernels from the hub for that, which CUDA graphs cannot hold, and multiplies the weights out without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from attention.backends.limits import HALF
from specdec.ops.mixtures.choice import own_form
from specdec.ops.mixtures.routed import BLOCK

MXFP4 = "mxfp4"


class Mxfp4Experts(nn.Module):
    """Takes the place of transformers' GptOssExperts; its parameters have the names and shapes of a checkpoint."""

    def __init__(self, config: Any) -> None:
        """config: a GptOssConfig, whose sizes 32 divides."""
        super().__init__()
        self.config = config
        self.num_experts = config.num_local_experts
        self.alpha = float(getattr(config, "swiglu_alpha", 1.702))
        self.limit = float(getattr(config, "swiglu_limit", 7.0))
        hidden, inner = config.hidden_size, config.intermediate_size
        for name, rows, width in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            shape = (self.num_experts, rows, width // BLOCK)
            blocks, scales = (torch.zeros(*shape, *more, dtype=torch.uint8) for more in ((BLOCK // 2,), ()))
            self.register_parameter(f"{name}_blocks", nn.Parameter(blocks, requires_grad=False))
            self.register_parameter(f"{name}_scales", nn.Parameter(scales, requires_grad=False))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.zeros(shape[:2]), requires_grad=False))

    def forward(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden_states [T, H], index [T, k] int64, weights [T, k] -> [T, H]."""
        return own_form(self, hidden_states, index, weights)


def keep_in_mxfp4(model: nn.Module, config: Any, left_out: list[str] | None = None) -> None:
    """Put empty `Mxfp4Experts` where a model has experts, on the meta device. left_out: modules kept as they are."""
    for name, module in list(model.named_modules()):
        if isinstance(module, GptOssExperts) and should_convert_module(name, left_out):
            with torch.device("meta"):
                model.set_submodule(name, Mxfp4Experts(config))


def stays_in_mxfp4(
    config: PreTrainedConfig, method: str | None, dtype: torch.dtype | str, device: torch.device, alone: bool
) -> bool:
    """Whether an MXFP4 target's experts stay in 4 bits: the kernels take half precision, on one GPU with all experts.

    alone: this process loads the whole model.
    """
    asked = getattr(config.get_text_config(), "dtype", None) if isinstance(dtype, str) else dtype
    published = method == MXFP4 and config.model_type == "gpt_oss"
    return published and alone and device.type == "cuda" and asked in HALF


class Mxfp4Quantizer(Mxfp4HfQuantizer):
    """transformers' quantizer for weights that stay as they are. Its own needs accelerate and kernels from the hub."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed."""

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """False for all: names and shapes equal the checkpoint's."""
        return False

    def get_weight_conversions(self) -> list[Any]:
        """None."""
        return []

    def _process_model_before_weight_loading(self, model: Any, use_kernels: bool = False, **kwargs: Any) -> None:
        self.modules_to_not_convert = self.get_modules_to_not_convert(
            model, self.quantization_config.modules_to_not_convert, model._keep_in_fp32_modules
        )
        keep_in_mxfp4(model, model.config, self.modules_to_not_convert)

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state unchanged: it has the checkpoint's format."""
        return model.state_dict(), {}


@contextmanager
def kept_in_mxfp4() -> Iterator[None]:
    """Inside, from_pretrained of an MXFP4 checkpoint keeps its experts in 4 bits."""
    before = AUTO_QUANTIZER_MAPPING[MXFP4]
    # In transformers' own table: `register_quantizer` refuses a method that exists.
    AUTO_QUANTIZER_MAPPING[MXFP4] = Mxfp4Quantizer
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING[MXFP4] = before
