"""Heads of the EAGLE family by one loader: which generation a folder holds, its tensors say."""

from __future__ import annotations

from pathlib import Path

import torch

from drafters.checkpoints.config_fields import HeadReport
from drafters.checkpoints.layouts import Layout
from drafters.checkpoints.tensor_files import read_json
from drafters.eagle1 import Eagle1Head, describe_eagle1, load_eagle1
from drafters.eagle3.checkpoint import TargetFacts, check_kind, describe_eagle3, load_eagle3, open_head
from drafters.eagle3.formats import target_named_by
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.overrides import Eagle3Overrides

_NO_OVERRIDES = Eagle3Overrides()


def load_eagle(
    path: str | Path,
    target: TargetFacts,
    dtype: torch.dtype,
    device: torch.device | str,
    overrides: Eagle3Overrides = _NO_OVERRIDES,
) -> Eagle3Head | Eagle1Head:
    """Load an EAGLE-1, EAGLE-2 or EAGLE-3 head in any layout.

    Args, Raises: as `drafters.eagle3.checkpoint.load_eagle3`.
    """
    if open_head(path).layout is Layout.EAGLE1:
        return load_eagle1(path, target, dtype, device, overrides)
    return load_eagle3(path, target, dtype, device, overrides)


def describe_eagle(path: str | Path, target: TargetFacts, overrides: Eagle3Overrides = _NO_OVERRIDES) -> HeadReport:
    """Resolve such a head without loading its weights.

    Raises:
        HeadLoadError, HeadMismatchError: as `load_eagle`, except for what only the values show.
    """
    describe = describe_eagle1 if open_head(path).layout is Layout.EAGLE1 else describe_eagle3
    return describe(path, target, overrides)


def target_of(path: str | Path) -> str | None:
    """The target that a head was made for, by its own config.json; None where that names none.

    Named by the package speculators (`speculators_config.verifier`) and by DeepSpec (`target_model_name_or_path`).

    Raises:
        HeadLoadError: the folder or hub model, or its config.json, cannot be read, or no loader here reads the kind of
            head that this names.
    """
    return target_named_by(read_json(check_kind(path) / "config.json"))
