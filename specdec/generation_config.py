"""transformers.GenerationConfig -> SamplingParams. What cannot be honoured is refused, never ignored."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from specdec.errors import InvalidInputError
from specdec.generation_values import check_values
from specdec.sampling import SamplingParams

_HONOURED = {
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_new_tokens",
    "max_length",
    "eos_token_id",
    "stop_strings",
    "num_return_sequences",
}
_HARMLESS = {
    "bos_token_id",
    "pad_token_id",
    "use_cache",
    "transformers_version",
    "cache_implementation",
    "return_dict_in_generate",
    "disable_compile",
}


def from_generation_config(config: GenerationConfig, model: PreTrainedModel, prompt_len: int) -> SamplingParams:
    """The sampling parameters that transformers' own `generate` would use for this config and model.

    Unset fields come from the model's generation config, then from transformers' defaults (top_k=50 when sampling).

    Args:
        prompt_len: tokens of the prompt, for a config that gives `max_length`; by default there are 20 new tokens.

    Raises:
        InvalidInputError: the config asks for something that is not supported (beams, penalties, watermarks, …), or has
            values of a wrong type.
    """
    check_values(config)
    merged, _ = model._prepare_generation_config(config)  # type: ignore[operator]
    _refuse_unsupported(merged)
    given_length = config.max_length is not None or model.generation_config.max_length is not None
    sampled = bool(merged.do_sample)
    own_eos = eos_ids(merged) == eos_ids(model.generation_config)
    return SamplingParams(
        max_new_tokens=_max_new_tokens(merged, prompt_len if given_length else 0),
        temperature=_or(merged.temperature, 1.0) if sampled else 0.0,
        top_k=_or(merged.top_k, 50) if sampled else 0,
        top_p=_or(merged.top_p, 1.0) if sampled else 1.0,
        min_p=_or(merged.min_p, 0.0) if sampled else 0.0,
        stop=tuple([merged.stop_strings] if isinstance(merged.stop_strings, str) else merged.stop_strings or ()),
        stop_token_ids=() if own_eos else eos_ids(merged),
        ignore_eos=not own_eos,
    )


def _refuse_unsupported(merged: GenerationConfig) -> None:
    neutral = merged._get_default_generation_params()
    odd = {
        name: value
        for name, value in merged.to_diff_dict().items()
        if name not in _HONOURED | _HARMLESS and not name.startswith("_") and value and value != neutral.get(name)
    }
    if odd:
        asked = ", ".join(f"{name}={value!r}" for name, value in sorted(odd.items()))
        raise InvalidInputError(
            f"not supported in GenerationConfig: {asked}; supported are {', '.join(sorted(_HONOURED))}"
        )


def eos_ids(config: GenerationConfig) -> tuple[int, ...]:
    """The config's eos ids as a tuple."""
    ids = config.eos_token_id
    return () if ids is None else tuple(ids) if isinstance(ids, (list, tuple)) else (int(ids),)


def _max_new_tokens(config: GenerationConfig, prompt_len: int) -> int:
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    length = _or(config.max_length, 20)
    if length <= prompt_len:
        raise InvalidInputError(
            f"max_length={length} leaves no room after a prompt of {prompt_len} tokens; set max_new_tokens"
        )
    return int(length) - prompt_len


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
