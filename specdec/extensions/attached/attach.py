"""attach: a transformers model whose own `generate` runs on this library, until it is detached.

The methods of the model's class are replaced by ones that look for an `Attachment` among the instance's attributes. So
nothing of it travels: a copy of the model, pickled, saved or deep-copied, is a plain one.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Self

from transformers import PreTrainedModel

from specdec.errors import InvalidInputError
from specdec.extensions.attached.served import Calls, nothing
from specdec.values import short

_PLACE = "_specdec_attachment"
_METHODS = ("generate", "generate_batch", "init_continuous_batching")
_lock = threading.RLock()
_replaced: dict[type, tuple[dict[str, Any], weakref.WeakSet[Attachment]]] = {}
"""Of each class whose methods are replaced: what it had itself, and its attachments."""


class Attachment:
    """Holds an attached model, see `attach`; a with-block detaches it at its end.

    Attributes:
        model: the SpeculativeModel that runs its calls. calls: how they are served.
    """

    def __init__(self, calls: Calls) -> None:
        self.calls, self.model, hf_model = calls, calls.model, calls.hf_model
        self.hf_model = hf_model
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
        found: Attachment | None = vars(model).get(_PLACE)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        state = "attached" if Attachment.of(self.hf_model) is self else "detached"
        return f"<specdec.attach of {type(self.hf_model).__name__}: {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model has none."""
        return (nothing, ())


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
    return Attachment(Calls(model, draft, fallback, options))


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


def _looking_first(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the class: the instance's attachment serves it, or the original."""

    @functools.wraps(original)
    def method(self: Any, *given: Any, **named: Any) -> Any:
        attachment, own = vars(self).get(_PLACE), original.__get__(self)
        if attachment is None:
            return own(*given, **named)
        return getattr(attachment.calls, name)(own, given, named)

    return method
