"""Where numbers come from: versions, device, hashes, seeds. Enough to repeat a run, nothing about person or place."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath
from typing import Any

from evals.data.datasets import DataSet

_PACKAGES = ("specdec-hf", "torch", "transformers", "tokenizers", "flashinfer-python", "lm_eval")


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that decide about the numbers; None for one that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_name(device: str) -> str:
    """The name of the processor that a torch device is."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    return platform.machine()


def data_facts(data: DataSet) -> dict[str, Any]:
    """Name, source, hash and the number of questions asked."""
    return {"name": data.name, "source": data.source, "sha256": data.sha256, "questions": len(data.questions)}


def model_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """A model's facts as they may be published: a folder is reduced to its name, and nothing measured is among them."""
    target = str(facts["target"])
    device = str(facts["device"])
    shown = PurePath(target).name if PurePath(target).is_absolute() else target
    fixed = {key: value for key, value in facts.items() if key != "self_test_error"}
    return {**fixed, "target": shown, "device_name": device_name(device)}
