"""Calls: transformers' generation methods of one model, run by a SpeculativeModel that wraps it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel

from specdec.attached.asked import WAY_OUT, Asked, check_arguments
from specdec.attached.manager import Manager
from specdec.errors import InvalidInputError
from specdec.model import SpeculativeModel


class Calls:
    """Serves calls of a model's own methods.

    Attributes:
        model: the SpeculativeModel that wraps `hf_model`.
        fallback: whether what is not served runs as transformers does.
    """

    def __init__(self, hf_model: Any, draft: Any, fallback: bool, options: dict[str, Any]) -> None:
        """Wrap a transformers model, or a PeftModel's inner one. Raises as `SpeculativeModel.from_pretrained`."""
        options = {"generation_config": "ignore", "tokenizer": NoTokenizer(_name_of(hf_model)), **options}
        self.model = SpeculativeModel.from_pretrained(hf_model, draft, **options)
        self.hf_model: PreTrainedModel = self.model.hf_model
        self.fallback = fallback

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model has none."""
        return (nothing, ())

    @torch.no_grad()
    def generate(self, original: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The call of the model's own `generate` with these arguments. original: the model's own."""
        try:
            arguments = _bound(original, given, named)
            if arguments["custom_generate"] is not None:  # another way of decoding, of the caller's
                return original(*given, **named)
            asked = self._asked(**arguments)
            params = asked.params(self.hf_model)
        except InvalidInputError:
            if self.fallback:
                return original(*given, **named)
            raise
        return asked.answer(self.model, params)

    def init_continuous_batching(
        self, original: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]
    ) -> Manager:
        """A manager with the interface of transformers' own."""
        arguments = _bound(original, given, named)
        config, options = arguments["generation_config"], arguments.get("continuous_batching_config")
        return Manager(self.model, config or self.hf_model.generation_config, options)

    def _asked(
        self,
        inputs: torch.Tensor | None,
        generation_config: GenerationConfig | None,
        logits_processor: Any,
        stopping_criteria: Any,
        prefix_allowed_tokens_fn: Any,
        streamer: Any,
        kwargs: dict[str, Any],
        **others: Any,
    ) -> Asked:
        """Prepare the arguments with the model's own methods.

        Raises:
            InvalidInputError: an argument that is not served. ValueError: as transformers.
        """
        odd = [name for name, value in others.items() if value is not None]
        if odd:
            raise InvalidInputError(f"generate({', '.join(sorted(odd))}=…) is not served by specdec.attach: {WAY_OUT}")
        model: Any = self.hf_model
        kwargs = dict(kwargs)
        tokenizer, _ = kwargs.pop("tokenizer", None), kwargs.pop("trust_remote_code", None)
        kwargs.pop("assistant_tokenizer", None)
        given = [kwargs, vars(generation_config or GenerationConfig()), vars(model.generation_config)]
        by_default = [all(each.get(name) is None for each in given) for name in ("max_length", "min_length")]
        config, rest = model._prepare_generation_config(generation_config, **kwargs)
        model._validate_model_kwargs(rest.copy())
        has_mask = rest.get("attention_mask") is not None
        ids, name, rest = model._prepare_model_inputs(inputs, config.bos_token_id, rest)
        if name != "input_ids":
            raise InvalidInputError(f"generate({name}=…) is not served by specdec.attach, only input_ids: {WAY_OUT}")
        model._prepare_special_tokens(config, has_mask, device=ids.device, batch_size=len(ids))
        mask = rest.pop("attention_mask", None)
        if not has_mask:
            mask = model._prepare_attention_mask_for_generation(ids, config, rest)
        check_arguments(rest)
        if config.max_length is None:
            config.max_length = 20
        config = model._prepare_generated_length(config, *by_default, name, ids.shape[1], ids)
        model._validate_generated_length(config, ids.shape[1], by_default[0])
        own = (tuple(logits_processor or ()), tuple(stopping_criteria or ()), prefix_allowed_tokens_fn)
        return Asked(ids, mask, config, *own, streamer, tokenizer)


class NoTokenizer:
    """Stands for a tokenizer where token ids come and go. A text that must be read, while a multi-token-prediction
    module is checked, is encoded by the model's own, if that is at hand."""

    def __init__(self, name: str = "") -> None:
        """name: folder or hub name of the model."""
        self._name = name

    def __call__(self, text: str, **options: Any) -> Any:
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._name, local_files_only=True)
        except Exception as error:
            raise InvalidInputError(
                f"this model was attached without a tokenizer, and {self._name!r} has none: give attach(…, tokenizer=…)"
            ) from error
        return tokenizer(text, **options)

    def decode(self, token_ids: Any, **options: Any) -> str:
        """No text."""
        return ""


def _name_of(hf_model: Any) -> str:
    inner = hf_model.get_base_model() if hasattr(hf_model, "get_base_model") else hf_model
    return str(getattr(inner, "name_or_path", ""))


def nothing() -> None:
    """What copies of a model have where it has an attachment."""


def _bound(original: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name, defaults filled in. Raises TypeError as the call would."""
    bound = inspect.signature(original).bind(*given, **named)
    bound.apply_defaults()
    return dict(bound.arguments)
