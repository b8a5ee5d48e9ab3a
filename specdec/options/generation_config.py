"""SamplingParams from a generation_config: a caller's transformers.GenerationConfig, and the model's own.

A call without SamplingParams starts from the model's generation_config.json, as transformers' `generate` does: how it
samples, penalties, suppressed tokens, stop strings. What this library does not do of it is refused, never ignored,
unless the model is loaded with generation_config="ignore". SamplingParams are complete: nothing is added to them.

Source: huggingface/transformers, generation/utils.py: `_prepare_generation_config` (what is merged),
`_get_logits_processor` and `_get_stopping_criteria` (what a field does).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from transformers import GenerationConfig

from attention.toml_tables import read_tables
from specdec.errors import InvalidInputError
from specdec.options.load_options import Use
from specdec.options.logits_options import OFF, LogitsOptions
from specdec.values import Options, Reader, TokenIds, flag, listed, real, refuse_type, short, whole, without_none

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Served = Literal["device", "host", "without effect", "refused"]
"""Exact: applied on the device, or on the host; of neither effect; or refused by name."""
_SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
"""transformers' defaults, with do_sample."""
_TABLES = read_tables("specdec", "options/generation_fields.toml")
_SERVED: dict[str, Served] = {name: how for how, names in _TABLES["served"].items() for name in names}
_SERVED |= dict.fromkeys(("do_sample", *_SAMPLED, *OFF), "device")
"""What is done with a field, whoever sets it; all others are refused."""
_CALLS_ONLY = set(_TABLES["calls"]["only"])
_ONE_IS_OFF = {"repetition_penalty", "encoder_repetition_penalty", "guidance_scale", "num_beams", "num_beam_groups"}
_ZERO_IS_SET = {"forced_bos_token_id", "forced_eos_token_id", "assistant_ensemble_weight"}
_READ: dict[str, Reader] = {
    "do_sample": flag,
    "max_length": partial(whole, least=0),
    **dict.fromkeys(("max_new_tokens", "num_return_sequences"), partial(whole, least=1)),
    "top_k": partial(whole, least=0),
    **dict.fromkeys(("temperature", "top_p", "min_p"), partial(real, allowed="a number")),
}


def _plain(name: str, given: Any) -> None:
    """Refuse an object where a number, text, list, dict or object of transformers belongs."""
    of_transformers = type(given).__module__.partition(".")[0] == "transformers"
    if isinstance(given, (list, tuple, set)):
        for each in given:
            _plain(name, each)
    elif isinstance(given, dict):
        _plain(name, [*given, *given.values()])
    elif not isinstance(given, (bool, int, float, str, np.number, NoneType)) and not of_transformers:
        raise refuse_type(name, given, "a plain value; see transformers' documentation of GenerationConfig")


_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
_WAY_OUT = (
    'load the model with from_pretrained(…, generation_config="ignore"), which switches this off, or set it to None in '
    "model.hf_model.generation_config"
)


def sampling_fields(config: GenerationConfig, model: PreTrainedModel, prompt_len: int, use: Use) -> Options:
    """Fields of SamplingParams for what transformers' own `generate` would use for this config and model.

    Unset fields come from the model's generation config, then from transformers' defaults (top_k=50 when sampling).

    Args:
        prompt_len: tokens of the prompt, for a config that gives `max_length`; by default there are 20 new tokens.
        use: "ignore": of the model's generation config only the token ids (eos, bos, pad) are merged.

    Raises:
        InvalidInputError: the config needs something that is not supported (beams, penalties, watermarks, …), or has
            values of a wrong type.
    """
    for name, given in vars(config).items():  # of a right type; stop strings and token ids are read later
        if given is not None:
            _READ.get(name, _plain)(f"GenerationConfig.{name}", given)
    own = _own(model, use)
    whole_config = merged(config, own)
    _refuse_unsupported(config, whole_config)
    given_length = config.max_length is not None or own.max_length is not None
    own_eos = eos_ids(whole_config) == eos_ids(own)
    found = _fields_of(whole_config)
    found["max_new_tokens"] = _max_new_tokens(whole_config, prompt_len if given_length else 0)
    return found if own_eos else {**found, "stop_token_ids": eos_ids(whole_config), "ignore_eos": True}


def _fields_of(config: GenerationConfig) -> Options:
    """Fields of SamplingParams that a config sets; of its lengths only max_new_tokens."""
    found = {"max_new_tokens": config.max_new_tokens, "max_time": config.max_time, "n": config.num_return_sequences}
    found |= {"stop": config.stop_strings or None}
    if config.do_sample:
        found |= _SAMPLED | without_none({name: getattr(config, name) for name in _SAMPLED})
    found |= LogitsOptions(**{name: getattr(config, name, None) for name in OFF}).settings
    return without_none(found)


def sampling_of_model(model: Any) -> Options:
    """Fields of SamplingParams that a model's own generation_config sets; see `SamplingParams.from_model`.

    Raises:
        InvalidInputError: it samples in a way that is not supported, or this is no model.
    """
    config = getattr(getattr(model, "hf_model", model), "generation_config", None)
    if not isinstance(config, GenerationConfig):
        raise InvalidInputError(f"from_model takes a SpeculativeModel or a transformers model, not {short(model)}")
    return _fields_of(config)


def own_fields(model: PreTrainedModel, use: Use) -> Options:
    """Fields of SamplingParams that a call without them starts from.

    Raises:
        InvalidInputError: the model's own generation_config has a field that is not served; the message names it.
    """
    if use == "ignore" or model.generation_config is None:
        return {}
    if odd := unsupported(model.generation_config):
        raise InvalidInputError(
            f"the model's own generation_config has {named(odd)}, which transformers' generate applies to every call "
            f"and this library does not: {_WAY_OUT}, or give SamplingParams, to which nothing of it is added"
        )
    return sampling_of_model(model)


def unsupported(config: GenerationConfig) -> Options:
    """Set fields of a model's generation_config that change its greedy tokens and that are not supported."""
    return _set_fields(config, refused_fields())


def refused_fields(*configs: GenerationConfig) -> frozenset[str]:
    """Fields of the installed transformers' GenerationConfig that a model's own may not set, and those of some configs
    that there are not: misspelt, most likely."""
    names = {name for config in (GenerationConfig(), *configs) for name in vars(config) if not name.startswith("_")}
    return frozenset(name for name in names - _CALLS_ONLY if how_served(name) == "refused")


def how_served(name: str) -> Served:
    """What is done with a field of a caller's GenerationConfig, whichever version it is of."""
    return _SERVED.get(name, "refused")


def is_off(name: str, value: Any) -> bool:
    """Whether a field of a caller's GenerationConfig with this value changes nothing; False where there is no such."""
    config = GenerationConfig()
    if how_served(name) == "without effect":
        return True
    if not hasattr(config, name):
        return False
    setattr(config, name, value)
    return not _set_fields(config, [name])


def eos_ids(config: GenerationConfig | None) -> TokenIds:
    """The config's eos ids as a tuple."""
    ids: Any = None if config is None else config.eos_token_id
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    each = [] if ids is None else listed(ids)
    return tuple(whole("eos_token_id", token_id, -1, None, "a token id, or a list of them") for token_id in each)


def _own(model: PreTrainedModel, use: Use) -> GenerationConfig:
    """The part of the model's generation config that applies."""
    own: GenerationConfig = model.generation_config
    return own if use == "model" else GenerationConfig(**{name: getattr(own, name, None) for name in _IDS})


def merged(config: GenerationConfig, own: GenerationConfig) -> GenerationConfig:
    """`config`, then the model's, then transformers' defaults, as `_prepare_generation_config` merges them."""
    found = copy.deepcopy(config)
    for values in (own.to_dict(), found._get_default_generation_params()):
        for name, value in values.items():
            if getattr(found, name, None) is None:
                setattr(found, name, value)
    return found


def _refuse_unsupported(config: GenerationConfig, merged: GenerationConfig) -> None:
    odd = _set_fields(merged, refused_fields(config)) | _set_fields(config, _CALLS_ONLY)
    if not odd:
        return
    own = [name for name in odd if getattr(config, name, None) is None]
    where = f"; {', '.join(sorted(own))}: from the model's own generation_config: {_WAY_OUT}" if own else ""
    served = ", ".join(sorted(n for n in vars(GenerationConfig()) if how_served(n) in ("device", "host")))
    instead = '; drafts by lookup are chosen at loading: draft="lookup"' if "prompt_lookup_num_tokens" in odd else ""
    raise InvalidInputError(f"not supported in GenerationConfig: {named(odd)}{instead}; supported are {served}{where}")


def _set_fields(config: GenerationConfig, names: Iterable[str]) -> Options:
    """Those of the fields that do something."""
    neutral = config._get_default_generation_params()
    values = {name: getattr(config, name, None) for name in names}
    return {name: value for name, value in values.items() if _is_set(name, value, neutral.get(name))}


def _is_set(name: str, value: Any, neutral: Any) -> bool:
    if value is None or name in _ZERO_IS_SET:
        return value is not None
    if name in _ONE_IS_OFF:
        return bool(value != 1)
    if name in _CALLS_ONLY:
        return value is not False and bool(value != neutral)
    return bool(value) and value != neutral


def _max_new_tokens(config: GenerationConfig, prompt_len: int) -> int:
    if config.max_new_tokens is not None:
        return config.max_new_tokens
    given = 20 if config.max_length is None else config.max_length
    length = whole("max_length", given, 1, None, "at least 1, a whole number")
    if length <= prompt_len:
        raise InvalidInputError(
            f"max_length={length} leaves no room after a prompt of {prompt_len} tokens; set max_new_tokens"
        )
    return length - prompt_len


def named(fields: Options) -> str:
    """Fields and their values, for a message."""
    return ", ".join(f"{name}={short(value)}" for name, value in sorted(fields.items()))
