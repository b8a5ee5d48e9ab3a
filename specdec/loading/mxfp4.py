"""Loading gpt-oss with its experts in MXFP4 as they are stored (`specdec.wrapped.mxfp4` runs them)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from attention.backends.limits import HALF
from specdec.wrapped.mxfp4 import keep_in_mxfp4

MXFP4 = "mxfp4"


def stays_in_mxfp4(
    config: PreTrainedConfig, method: str | None, dtype: torch.dtype | str, device: torch.device, alone: bool
) -> bool:
    """Whether such a target's experts stay in 4 bits: our kernels take half precision, on one GPU with all experts.

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
        """None does: names and shapes are those of the checkpoint."""
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
        """The state as it is: it is that of the checkpoint."""
        return model.state_dict(), {}


@contextmanager
def kept_in_mxfp4() -> Iterator[None]:
    """Inside, from_pretrained of such a checkpoint keeps its experts in 4 bits."""
    before = AUTO_QUANTIZER_MAPPING[MXFP4]
    AUTO_QUANTIZER_MAPPING[MXFP4] = Mxfp4Quantizer
    try:
        yield
    finally:
        AUTO_QUANTIZER_MAPPING[MXFP4] = before
