"""attach: a transformers model whose own `generate` runs on this library, until it is detached.

The methods of the model's class are replaced by ones that look for an `Attachment` among the instance's attributes. So
nothing of it travels: a copy of the model, pickled, saved or deep-copied, is a plain one.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Self

import torch
from transformers import AutoTokenizer, GenerationConfig, GenerationMixin, PreTrainedModel

from specdec.errors import InvalidInputError, ModelChangedError
from specdec.extensions.attached.asked import CACHES, WAY_OUT, Asked, check_arguments, has_adapter_for_each_row
from specdec.extensions.attached.manager import Manager
from specdec.model import SpeculativeModel
from specdec.values import Function, Options, short, without

_PLACE = "_specdec_attachment"
_METHODS = ("generate", "generate_batch", "init_continuous_batching")
_lock = threading.RLock()
_replaced: dict[type, tuple[Options, weakref.WeakSet[Attachment]]] = {}
"""Of each class whose methods are replaced: what it had itself, and its attachments."""


_REFUSALS = (ModelChangedError, ValueError)
"""Errors of a call that is not served, InvalidInputError among them; transformers' own ValueErrors it raises again."""
_own_path = ContextVar("_own_path", default=False)
"""Whether a model's own `generate_batch` runs, whose manager is the model's own then."""


class Attachment:
    """Holds an attached model, see `attach`; a with-block detaches it at its end.

    Attributes:
        model: the SpeculativeModel that runs the calls of `hf_model`.
        fallback: whether what is not served runs as transformers does.
    """

    def __init__(self, hf_model: Any, draft: Any, fallback: bool, options: Options) -> None:
        """Raises as `wrapped`."""
        self.model = wrapped(hf_model, draft, options)
        self.fallback = fallback
        self._draft = draft
        self.hf_model = self.model.hf_model
        hf_model = self.hf_model
        self._own_generate = vars(hf_model).pop("generate", None)  # of a repository with a custom_generate folder
        vars(hf_model)[_PLACE] = self
        _replace(type(hf_model), self)

    def detach(self) -> None:
        """Put the model's own methods back and free caches. Idempotent.

        Calls on other threads that are not done raise ClosedModelError.
        """
        if Attachment.of(self.hf_model) is self:
            del vars(self.hf_model)[_PLACE]
            if self._own_generate is not None:
                vars(self.hf_model)["generate"] = self._own_generate
            _put_back(type(self.hf_model), self)
        self.model.close()

    @staticmethod
    def of(model: PreTrainedModel) -> Attachment | None:
        """The attachment of a model; None where it has none."""
        return vars(model).get(_PLACE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        state = "attached" if Attachment.of(self.hf_model) is self else "detached"
        return f"<specdec.attach of {type(self.hf_model).__name__}: {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model has none."""
        return (_nothing, ())

    @torch.no_grad()
    def _generate(self, call: partial[Any]) -> Any:
        """A call of the model's own `generate`.

        Raises:
            InvalidInputError, ModelChangedError: it is not served, and runs as transformers does where `fallback` is
                set. Others: as transformers, or as `SpeculativeModel.generate`.
        """
        named = call.keywords
        # Another way of decoding, or an adapter of peft's for each row: the model's own path is the call's.
        another = named.get("custom_generate") is not None or named.get("cache_implementation") == "paged"
        if another or has_adapter_for_each_row(self.hf_model):
            return call()
        started = self._unless_refused(lambda: self._asked(call).started(self.model))
        return call() if started is None else started.result()

    @torch.no_grad()
    def _generate_batch(self, call: partial[Any]) -> Any:
        """The model's own `generate_batch`, over a `Manager` unless a prompt or the config is not served."""
        arguments = _with_defaults(call)
        config = arguments.get("generation_config") or self.hf_model.generation_config
        new_tokens = arguments.get("kwargs", {}).get("max_new_tokens", config.max_new_tokens)

        def is_served() -> bool:
            Manager(self.model, config).check(arguments["inputs"], new_tokens)
            return True

        token = _own_path.set(not self._unless_refused(is_served))
        try:
            return call()
        finally:
            _own_path.reset(token)

    def _init_continuous_batching(self, call: partial[Any]) -> Any:
        """A manager with the interface of transformers' own, or that itself."""
        arguments = _with_defaults(call)
        config = arguments["generation_config"]
        options = arguments.get("continuous_batching_config")
        own = config or self.hf_model.generation_config
        manager = None if _own_path.get() else self._unless_refused(lambda: Manager(self.model, own, options))
        return call() if manager is None else manager

    def _unless_refused(self, decide: Callable[[], Any]) -> Any:
        """What `decide` finds; None where the call is to run as transformers does. Raises as `_generate`."""
        try:
            return decide()
        except _REFUSALS:
            if not self.fallback:
                raise
        return None

    def _asked(self, call: partial[Any]) -> Asked:
        """Prepare the arguments with the model's own methods.

        Raises:
            InvalidInputError: an argument that is not served. ValueError: as transformers.
        """
        model: Any = self.hf_model
        if inspect.unwrap(getattr(call.func, "__func__", call.func)) is not inspect.unwrap(GenerationMixin.generate):
            raise InvalidInputError(f"{type(model).__name__} has a generate of its own, in place of transformers'")
        arguments = _with_defaults(call)
        kwargs = without(arguments.pop("kwargs"), ("trust_remote_code", "assistant_tokenizer"))
        inputs = arguments.pop("inputs")
        generation_config = arguments.pop("generation_config")
        streamer = arguments.pop("streamer")
        function = arguments.pop("prefix_allowed_tokens_fn")
        processors = arguments.pop("logits_processor")
        criteria = arguments.pop("stopping_criteria")
        if arguments.get("assistant_model") is self._draft:  # the one that drafts here
            arguments["assistant_model"] = None
        odd = {**arguments, **{name: kwargs.pop(name) for name in CACHES & set(kwargs)}}
        names = sorted(name for name, value in odd.items() if value is not None and value is not False)
        if names:
            hint = "attach(model, draft=assistant) drafts with an assistant; " * ("assistant_model" in names)
            raise InvalidInputError(f"generate({', '.join(names)}=…) is not served by specdec.attach: {hint}{WAY_OUT}")
        tokenizer = kwargs.pop("tokenizer", None)
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


def attach(model: Any, draft: Any = None, *, fallback: bool = False, **options: Any) -> Attachment:
    """Run a transformers model's own `generate`, `generate_batch` and `init_continuous_batching` on this library.

    With the same arguments and results, until `detach()` or the end of a with-block:

        with specdec.attach(model, draft="path/of/a/head"):
            model.generate(**inputs, max_new_tokens=100)

    Differences: padding is no text (transformers' penalties count pad tokens of the prompt); scores and logits of
    sequences that have ended are 0; a streamer gets several tokens after each round; `past_key_values` is None. Calls
    with an adapter for each prompt (`adapter_names`) or a `custom_generate` of their own run as before.

    Args:
        model: a loaded model, or a PeftModel, whose own `generate` calls its inner one; copies, and what is saved of
            it, are plain models. It stays attached when nobody keeps the handle, until it is garbage itself.
        draft: as for `SpeculativeModel.from_pretrained`.
        options: likewise.
        fallback: calls that are not served (docs/what_is_done.md has the list) run as transformers does; else they
            raise InvalidInputError, or ModelChangedError, which names the cause, before anything changes.

    Raises:
        InvalidInputError: no transformers model, or one that is attached. Others: as
            `SpeculativeModel.from_pretrained`.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of a PeftModel
    if not isinstance(inner, PreTrainedModel):
        raise InvalidInputError(f"attach takes a loaded transformers model, not {short(model)}; load it first")
    if Attachment.of(inner) is not None:
        raise InvalidInputError(
            "this model is attached already; use that, or detach() it first (specdec.Attachment.of(model) finds it)"
        )
    return Attachment(model, draft, fallback, options)


def _replace(cls: type, attachment: Attachment) -> None:
    with _lock:
        if cls not in _replaced:
            _replaced[cls] = ({name: vars(cls).get(name) for name in _METHODS}, weakref.WeakSet())
            for name in _METHODS:
                if (original := getattr(cls, name, None)) is not None:
                    setattr(cls, name, _looking_first(name, original))
        _replaced[cls][1].add(attachment)


def _put_back(cls: type, attachment: Attachment) -> None:
    with _lock:
        own, attachments = _replaced[cls]
        attachments.discard(attachment)
        if attachments:
            return
        del _replaced[cls]
        for name, method in own.items():
            if method is not None:
                setattr(cls, name, method)
            elif name in vars(cls):
                delattr(cls, name)


def _looking_first(name: str, original: Function) -> Function:
    """A method of the class: the instance's attachment serves it, or the original."""

    @wraps(original)
    def method(self: Any, *given: Any, **named: Any) -> Any:
        attachment = vars(self).get(_PLACE)
        call = partial(original.__get__(self), *given, **named)
        return call() if attachment is None else getattr(attachment, f"_{name}")(call)

    return method


@dataclass(frozen=True)
class NoTokenizer:
    """Stands for a tokenizer where token ids come and go. A text that must be read, while a multi-token-prediction
    module is checked, is encoded by the model's own, if that is at hand.

    name: folder or hub name of the model.
    """

    name: str = ""

    def __call__(self, text: str, **options: Any) -> Any:
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.name, local_files_only=True)
        except Exception as error:
            raise InvalidInputError(
                f"this model was attached without a tokenizer, and {self.name!r} has none: give attach(…, tokenizer=…)"
            ) from error
        return tokenizer(text, **options)

    def decode(self, token_ids: Any, **options: Any) -> str:
        """No text."""
        return ""


def wrapped(hf_model: Any, draft: Any, options: Options) -> SpeculativeModel:
    """What runs calls of a transformers model, or of a PeftModel's inner one.

    Raises as `SpeculativeModel.from_pretrained`.
    """
    tokenizer = NoTokenizer(str(getattr(hf_model, "name_or_path", "")))
    return SpeculativeModel.from_pretrained(
        hf_model, draft, **{"generation_config": "ignore", "tokenizer": tokenizer, **options}
    )


def _nothing() -> None:
    """What copies of a model have where it has an attachment."""


def _with_defaults(call: partial[Any]) -> Options:
    """Arguments of a call by name, defaults filled in. Raises TypeError as the call would."""
    bound = inspect.signature(call.func).bind(*call.args, **call.keywords)
    bound.apply_defaults()
    return bound.arguments
