"""Set the caller's torch state (inference mode, autocast, default device) aside: while loading, testing, in rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

_AUTOCAST_DEVICES = ("cpu", "cuda")


@contextmanager
def own_torch_state() -> Iterator[None]:
    """On this thread: no autocast, no default device, no inference mode; afterwards all are as before.

    Autocast would round what the self-tests compare, and an eager forward otherwise than a paged one. A default device
    (`torch.set_default_device`, `with torch.device(…)`) would place tensors that are made on the CPU first, by a
    generator of the CPU. Tensors made in inference mode could not be written by graphs captured outside.

    Also a decorator. Rounds do the same for autocast and default device: `at_home`.
    """
    with ExitStack() as own:
        own.enter_context(torch.inference_mode(False))
        for device in _AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                own.enter_context(torch.autocast(device, enabled=False))
        own.enter_context(no_default_device())
        yield


def at_home(device: torch.device, stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """Torch's thread-local state, the same for every round: device, stream (None on a CPU), no autocast."""
    autocast = torch.is_autocast_enabled(device.type)
    default = any(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())
    if stream is None and not autocast and not default:
        return nullcontext()
    home = ExitStack()
    if stream is not None:
        home.enter_context(torch.cuda.device(device))
        home.enter_context(torch.cuda.stream(stream))
    if autocast:
        home.enter_context(torch.autocast(device.type, enabled=False))
    if default:
        home.enter_context(no_default_device())
    return home


@contextmanager
def no_default_device() -> Iterator[None]:
    """Without a default device on this thread. Not the CPU as such: the compiler would trace the mode that sets it.

    Source: torch/utils/_device.py, `DeviceContext`, and torch/overrides.py, its stack of modes.
    """
    before = _get_current_function_mode_stack()
    _replace_modes([mode for mode in before if not isinstance(mode, DeviceContext)])
    try:
        yield
    finally:
        _replace_modes(before)


def _replace_modes(modes: list[Any]) -> None:
    for _ in _get_current_function_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
