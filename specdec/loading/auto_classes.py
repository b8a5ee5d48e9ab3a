"""Which of transformers' auto classes a configuration's model is loaded through."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from specdec.errors import ModelLoadError


class AutoClass(NamedTuple):
    """An auto class, with the model classes that it loads by their configurations'."""

    loader: Any
    mapping: Any


_CAUSAL = AutoClass(AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING)
_WRAPPERS = (
    AutoClass(AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    AutoClass(AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING),
)
"""A language model inside a model that reads images or sound too; the second knows all that the first does."""


def auto_class(config: PreTrainedConfig, name: str) -> AutoClass:
    """The auto class for a configuration: the one for causal language models if it knows it, else one of wrappers.

    Raises:
        ModelLoadError: an encoder, with or without a decoder, or no language model; the message has `name`.
    """
    kind, custom = type(config), getattr(config, "auto_map", None) or {}
    reason = "no such model"
    for known in (_CAUSAL, *_WRAPPERS):
        if kind not in known.mapping and known.loader.__name__ not in custom:
            continue
        if known is _CAUSAL and kind in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", True) is False:
            reason = "an encoder (is_decoder is false)"
        elif known is not _CAUSAL and getattr(config, "is_encoder_decoder", False):
            reason = "an encoder and a decoder"
        else:
            return known
        break
    else:
        if getattr(config, "is_encoder_decoder", False):
            reason = "an encoder and a decoder"
    raise ModelLoadError(
        f"cannot load the target model {name!r}: causal language models are supported, and "
        f"model_type={config.model_type!r} is {reason}"
    )


def model_class(config: PreTrainedConfig, found: AutoClass) -> Any:
    """The class of a configuration's model; PreTrainedModel where it is the checkpoint's own code."""
    return found.mapping.get(type(config), PreTrainedModel)
