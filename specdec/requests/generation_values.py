"""The values of a transformers.GenerationConfig, which takes any, checked before transformers computes with them."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import GenerationConfig

from specdec.errors import InvalidInputError
from specdec.values import flag, short, whole

_WHOLE = {"max_new_tokens": 1, "max_length": 0, "top_k": 0, "num_return_sequences": 1}
_NUMBERS = ("temperature", "top_p", "min_p")


def check_values(config: GenerationConfig) -> None:
    """Refuse values of a wrong type, by the name of their field.

    Raises:
        InvalidInputError: a count that is no whole number, a rate that is no number, stop strings that are no strings,
            or an object where a plain value (number, text, list, dict, an object of transformers) belongs.
    """
    for name, given in vars(config).items():
        if given is None:
            continue
        if name in _WHOLE:
            whole(f"GenerationConfig.{name}", given, _WHOLE[name])
        elif name == "do_sample":
            flag(f"GenerationConfig.{name}", given)
        elif not _fits(name, given):
            raise InvalidInputError(
                f"GenerationConfig.{name}={short(given)} ({type(given).__name__}): not a value that it can have; see "
                "transformers' documentation of GenerationConfig"
            )


def _fits(name: str, given: Any) -> bool:
    if name in _NUMBERS:
        return isinstance(given, (int, float, np.number)) and not isinstance(given, bool)
    if name == "stop_strings":
        return isinstance(given, str) or (
            isinstance(given, (list, tuple)) and all(isinstance(stop, str) for stop in given)
        )
    if name == "eos_token_id":
        ids = given if isinstance(given, (list, tuple)) else [given]
        return all(isinstance(one, (int, np.integer)) and not isinstance(one, bool) for one in ids)
    return _plain(given)


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set)):
        return all(_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_plain(item) for pair in value.items() for item in pair)
    kind = type(value)
    return value is None or kind in (bool, int, float, str) or kind.__module__.partition(".")[0] == "transformers"
