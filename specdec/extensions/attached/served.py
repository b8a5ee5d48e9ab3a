"""Calls: transformers' generation methods of one model, run by a SpeculativeModel that wraps it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, GenerationMixin, PreTrainedModel

from specdec.errors import InvalidInputError, ModelChangedError
from specdec.extensions.attached.asked import CACHES, WAY_OUT, Asked, check_arguments, has_adapter_for_each_row
from specdec.extensions.attached.manager import Manager
from specdec.model import SpeculativeModel

_REFUSALS = (ModelChangedError, ValueError)
"""Errors of a call that is not served, InvalidInputError among them; transformers' own ValueErrors it raises again."""
_own_path = ContextVar("_own_path", default=False)
"""Whether a model's own `generate_batch` runs, whose manager is the model's own then."""


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
        """The call of the model's own `generate` with these arguments. original: the model's own.

        Raises:
            InvalidInputError, ModelChangedError: it is not served, and runs as transformers does where `fallback` is
                set. Others: as transformers, or as `SpeculativeModel.generate`.
        """
        if self._is_another_way(named):
            return original(*given, **named)
        started = self._unless_refused(lambda: self._asked(original, given, named).started(self.model))
        return original(*given, **named) if started is None else started.result()

    @torch.no_grad()
    def generate_batch(self, original: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The model's own `generate_batch`, over a `Manager` unless a prompt or the config is not served."""
        arguments = inspect.signature(original).bind(*given, **named).arguments
        config = arguments.get("generation_config") or self.hf_model.generation_config
        new_tokens = arguments.get("kwargs", {}).get("max_new_tokens", config.max_new_tokens)

        def is_served() -> bool:
            Manager(self.model, config).check(arguments["inputs"], new_tokens)
            return True

        token = _own_path.set(not self._unless_refused(is_served))
        try:
            return original(*given, **named)
        finally:
            _own_path.reset(token)

    def init_continuous_batching(
        self, original: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """A manager with the interface of transformers' own, or that itself."""
        arguments = _bound(original, given, named)
        config, options = arguments["generation_config"], arguments.get("continuous_batching_config")
        own = config or self.hf_model.generation_config
        manager = None if _own_path.get() else self._unless_refused(lambda: Manager(self.model, own, options))
        return original(*given, **named) if manager is None else manager

    def _unless_refused(self, decide: Callable[[], Any]) -> Any:
        """What `decide` finds; None where the call is to run as transformers does. Raises as `generate`."""
        try:
            return decide()
        except _REFUSALS:
            if not self.fallback:
                raise
        return None

    def _is_another_way(self, named: dict[str, Any]) -> bool:
        """Whether the model's own path is the call's: another way of decoding, or an adapter of peft's for each row."""
        another = named.get("custom_generate") is not None or named.get("cache_implementation") == "paged"
        return another or has_adapter_for_each_row(self.hf_model)

    def _asked(self, original: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]) -> Asked:
        """Prepare the arguments with the model's own methods.

        Raises:
            InvalidInputError: an argument that is not served. ValueError: as transformers.
        """
        model: Any = self.hf_model
        if inspect.unwrap(getattr(original, "__func__", original)) is not inspect.unwrap(GenerationMixin.generate):
            raise InvalidInputError(f"{type(model).__name__} has a generate of its own, in place of transformers'")
        arguments = _bound(original, given, named)
        kwargs = dict(arguments.pop("kwargs"))
        inputs, generation_config = arguments.pop("inputs"), arguments.pop("generation_config")
        streamer, function = arguments.pop("streamer"), arguments.pop("prefix_allowed_tokens_fn")
        processors, criteria = arguments.pop("logits_processor"), arguments.pop("stopping_criteria")
        odd = {**arguments, **{name: kwargs.pop(name) for name in CACHES & set(kwargs)}}
        names = sorted(name for name, value in odd.items() if value is not None and value is not False)
        if names:
            raise InvalidInputError(f"generate({', '.join(names)}=…) is not served by specdec.attach: {WAY_OUT}")
        tokenizer, _ = kwargs.pop("tokenizer", None), kwargs.pop("trust_remote_code", None)
        kwargs.pop("assistant_tokenizer", None)
        configs = [kwargs, vars(generation_config or GenerationConfig()), vars(model.generation_config)]
        by_default = [all(each.get(name) is None for each in configs) for name in ("max_length", "min_length")]
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
        config = model._prepare_generated_length(config, *by_default, name, ids.shape[-1], ids)
        model._validate_generated_length(config, ids.shape[-1], by_default[0])
        return Asked(ids, mask, config, tuple(processors or ()), tuple(criteria or ()), function, streamer, tokenizer)


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
