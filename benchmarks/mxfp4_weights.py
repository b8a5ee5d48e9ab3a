"""The experts of a random gpt-oss in MXFP4, as published checkpoints have them."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from specdec.wrapped.quantised_layers import Mxfp4Experts, keep_in_mxfp4

_EXPONENTS = 118, 121
"""Of weights of about 0.01."""


def draw_mxfp4(model: PreTrainedModel) -> None:
    """Experts of any bytes in place of the model's, on its device."""
    device = model.device
    keep_in_mxfp4(model, model.config)
    model.eval()
    for module in model.modules():
        if isinstance(module, Mxfp4Experts):
            module.to_empty(device=device)
            for name, parameter in module.named_parameters():
                if name.endswith("_bias"):
                    parameter.data = torch.zeros(parameter.shape, dtype=model.dtype, device=device)
                else:
                    parameter.random_(*(_EXPONENTS if name.endswith("_scales") else (0, 256)))
