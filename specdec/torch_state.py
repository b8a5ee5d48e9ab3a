"""The caller's torch state, set aside while a model is loaded, tested or asked: what it says does not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_AUTOCAST_DEVICES = ("cpu", "cuda")


@contextmanager
def own_torch_state() -> Iterator[None]:
    """On this thread: no autocast, the CPU as default device, no inference mode; afterwards all are as before.

    Autocast would round what the self-tests compare, and an eager forward otherwise than a paged one. A default device
    (`torch.set_default_device`, `with torch.device(…)`) would place tensors that are made on the CPU first, by a
    generator of the CPU. Tensors made in inference mode could not be written by graphs captured outside.

    Also a decorator. Rounds do the same for autocast: `SharedEngine._at_home`.
    """
    with ExitStack() as own:
        own.enter_context(torch.inference_mode(False))
        for device in _AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                own.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            own.enter_context(torch.device("cpu"))
        yield
