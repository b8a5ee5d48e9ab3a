"""Model types with a language model inside, beside what reads images or sound, and their configurations made tiny.

They are too different to be shrunk by a list of names for each; `specdec.selftest.shrinking`, which makes the miniature
that every load is tested by, makes them small, with all thresholds low.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from specdec.selftest.shrinking import miniature, thresholds

_LONGEST = 10**9
_QWEN: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}
_GLM = _QWEN | {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
_ROPE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("glm4v", "glm46v", "glm_ocr", "glmga", "glm4v_moe"), _GLM),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "paddleocr_vl"), _QWEN),
}
"""Rotary parameters of published configurations where those of the class name no sections."""


def wrapper_types() -> tuple[str, ...]:
    """Model types that transformers loads as text from images or sound, and not as causal language models."""
    known = dict.fromkeys([*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES])
    return tuple(name for name in known if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_wrapper(name: str) -> Any:
    """The shrunk configuration of such a type."""
    config = AutoConfig.for_model(name)
    if name in _ROPE:
        config.get_text_config().rope_parameters = dict(_ROPE[name])
    return miniature(config, [threshold.name for threshold in thresholds(config, _LONGEST)])
