"""Functions that stand in for the forwards of modules while a forward of ours runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from attention.hf.borrowed import borrowed

StandIn = tuple[nn.Module, Callable[..., Any]]
"""A module, and what is called instead of its forward; hooks of the module stay in place."""


@contextmanager
def standing_in(stand_ins: Sequence[StandIn]) -> Iterator[None]:
    """Let these functions stand in for the duration of one forward, on the thread that holds the model's gate.

    They are the same objects each time, so that compiled code, which looks at them, stays valid.
    """
    with borrowed((module, "forward", function) for module, function in stand_ins):
        yield
