"""Attention backends by name, with requirements and constructors, and what some of them offer on request. Further
backends are added by `register`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:  # `specdec --help` reads the names, and imports nothing heavy
    import torch

    from attention.backends.base import AttentionBackend


@dataclass(frozen=True)
class BackendKind:
    """A backend that can be chosen by name.

    Attributes:
        make: gives it for a device. It imports the kernels, not before.
        needs_cuda: whether it runs on CUDA devices only. needs_nvidia: of those on NVIDIA GPUs only, not on ROCm.
        package: the Python package that it needs, "" for none. install: how a user gets that.
    """

    make: Callable[[torch.device], AttentionBackend]
    needs_cuda: bool = False
    needs_nvidia: bool = False
    package: str = ""
    install: str = ""

    @property
    def is_installed(self) -> bool:
        """Whether its package is there."""
        return not self.package or find_spec(self.package) is not None


def _on_device(name: str) -> Callable[[torch.device], AttentionBackend]:
    """Makes the backend of this class (module:name), which is imported then."""
    return lambda device: resolve_name(f"attention.backends.{name}")(device)


KINDS: dict[str, BackendKind] = {
    "auto": BackendKind(lambda device: KINDS[chosen("auto", device)].make(device)),
    "torch": BackendKind(_on_device("reference:TorchBackend")),
    "flashinfer": BackendKind(
        _on_device("flashinfer.backend:FlashInferBackend"),
        needs_cuda=True,
        needs_nvidia=True,
        package="flashinfer",
        install="FlashInfer is not installed: pip install \"specdec-hf[cuda]\", or choose backend='flex', which has no "
        "CUDA graphs",
    ),
    "flex": BackendKind(_on_device("flex:FlexBackend"), needs_cuda=True),
    "batch_invariant": BackendKind(
        lambda device: (
            resolve_name("attention.backends.invariant:InvariantBackend")()
            if device.type == "cuda"
            else resolve_name("attention.backends.reference:TorchBackend")(device, exact=True)
        ),
        needs_nvidia=True,
    ),
}
"""Backends by the name that a user gives; "auto" is the fastest that is there, see `chosen`."""


def register(name: str, kind: BackendKind) -> None:
    """Let a further backend be chosen by name, in this process. Raises ValueError: the name is taken."""
    if name in KINDS:
        raise ValueError(f"there is a backend {name!r} already; names are {', '.join(KINDS)}")
    KINDS[name] = kind


def chosen(name: str, device: torch.device) -> str:
    """The name itself; for "auto" FlashInfer on a GPU where it runs, else Flex there, and torch elsewhere."""
    if name != "auto":
        return name
    if device.type != "cuda":
        return "torch"
    import torch

    return "flex" if torch.version.hip is not None or not KINDS["flashinfer"].is_installed else "flashinfer"


@runtime_checkable
class CascadeBackend(Protocol):
    """A backend that can attend pages that several rows share once for all of them, where that pays."""

    def cascade(self) -> None:
        """Builders made from now on do."""
