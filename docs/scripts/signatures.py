"""For mkdocstrings, which reads files and runs nothing: the signature that a decorator gives `from_pretrained`."""

from __future__ import annotations

import inspect
from typing import Any

import griffe

from specdec import SpeculativeModel


class Signatures(griffe.Extension):  # type: ignore[misc]
    """Put in the parameters that `inspect.signature` finds."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """See `griffe.Extension.on_function`."""
        if func.path == "specdec.model.SpeculativeModel.from_pretrained":
            found = inspect.signature(SpeculativeModel.from_pretrained).parameters.values()
            func.parameters = griffe.Parameters(*map(_shown, found))


def _shown(parameter: inspect.Parameter) -> griffe.Parameter:
    default = None if parameter.default is parameter.empty else repr(parameter.default)
    kind = griffe.ParameterKind[parameter.kind.name.lower()]
    return griffe.Parameter(parameter.name, annotation=parameter.annotation, kind=kind, default=default)
