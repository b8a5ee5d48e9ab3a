"""`token_type_ids` beside a prompt's ids: what a tokenizer adds out of habit, or a mark that the model attends by.

PaliGemma reads the tokens of type 0 in both directions, so for it zeros are not the same as none at all; here every
prompt is read causally, as the model's `generate` reads ids alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from specdec.errors import InvalidInputError

_FIELD = "token_type_ids"
_ROUNDING = 0.05
"""Largest rms difference of logits over their rms that is rounding."""
_zeros_matter: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def check_token_types(prompts: Any, model: PreTrainedModel) -> None:
    """Refuse token types that this model would read, and that this library does not.

    Raises:
        InvalidInputError: types other than 0, or zeros where they change what the model says.
    """
    for prompt in _mappings(prompts):
        types = prompt.get(_FIELD)
        if types is None or _FIELD not in inspect.signature(model.forward).parameters:
            continue
        others = bool(torch.as_tensor(types).any())
        if others or _zeros_change(model):
            raise InvalidInputError(
                f"{_FIELD} beside the prompt's ids: {type(model).__name__} reads "
                f"{'other types than 0' if others else 'tokens of type 0 in both directions'}, and here text is read "
                f"causally, as by its own generate without {_FIELD}; leave {_FIELD} out"
            )


def _mappings(prompts: Any) -> Iterable[Mapping[str, Any]]:
    if isinstance(prompts, Mapping):
        return [prompts]
    several = isinstance(prompts, (list, tuple)) and prompts and not isinstance(prompts[0], (int, str))
    return [prompt for prompt in prompts if isinstance(prompt, Mapping)] if several else []


@torch.inference_mode()
def _zeros_change(model: PreTrainedModel) -> bool:
    """Whether zeros as token types change the logits of a short text, in the model's own forward."""
    if model not in _zeros_matter:
        ids = torch.arange(8, device=model.device)[None]
        plain, typed = (
            model(input_ids=ids, use_cache=False, **given).logits.float()
            for given in ({}, {_FIELD: torch.zeros_like(ids)})
        )
        _zeros_matter[model] = bool((typed - plain).norm() > _ROUNDING * plain.norm())
    return _zeros_matter[model]
