"""What a checkpoint and its configuration must agree on before a target is used.

transformers gives a tensor that a checkpoint lacks random numbers and drops one that the configuration has no place
for; either is a warning there. Such a model runs, but its output is not that of the checkpoint: here it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from specdec.errors import ModelLoadError

_SHOWN = 3
_MODULE_PARTS = ("enorm", "hnorm", "eh_proj")
"""Tensors by which a layer after the last is a multi-token-prediction module (names of DeepSeek-V3 and GLM-4.5)."""
_NUMBERED = re.compile(r"^(?P<list>.+)\.(?P<number>\d+)\.(?P<rest>.+)$")
_TRAINED = (".weight", ".bias")
_QUANTISED = (".weight_scale", ".weight_scale_2", ".weight_scale_inv", ".weight_packed", ".qweight", ".SCB")
"""Names that quantised linear layers have beside `weight`, or in its place: without them it means something else."""


def check_complete(name: str, model: nn.Module, info: Mapping[str, Any]) -> None:
    """Refuse a target that is not all of its checkpoint, or more than it.

    Args:
        name: what the user called it; model: as loaded.
        info: transformers' loading information (`output_loading_info=True`): `missing_keys`, `unexpected_keys` and
            `error_msgs`, and `mismatched_keys` as (name, shape in the checkpoint, shape in the model). Tied weights,
            and what the model's class or a quantizer makes itself, are not among the missing.

    Raises:
        ModelLoadError: tensors are missing, have another shape, or belong to decoder layers, or parts of them, that
            the configuration does not have. Other surplus tensors (scales of an 8-bit cache, value heads, image towers)
            change nothing that the model computes; transformers reports them.
    """
    cut = _surplus_in_layers(model, info["unexpected_keys"])
    problems = [
        _listed(info["missing_keys"], "missing from the checkpoint and would be random numbers"),
        _listed(
            [
                f"{key}: {_shape(stored)} in the checkpoint, {_shape(wanted)} by the configuration"
                for key, stored, wanted in info["mismatched_keys"]
            ],
            "of another shape",
        ),
        _listed(cut, "in the checkpoint, but the configuration has no place for them in the decoder's layers"),
        _listed(
            _surplus_in_layers(model, info["unexpected_keys"], _QUANTISED),
            "of quantised weights (scales, packed numbers) that nothing reads, as config.json does not say how",
        ),
        _listed(info.get("error_msgs") or (), "not loaded"),
    ]
    found = [problem for problem in problems if problem]
    if found:
        raise ModelLoadError(
            f"cannot load the target model {name!r}: the checkpoint does not fit its configuration: "
            f"{'; '.join(found)}.\nLook whether config.json "
            "(num_hidden_layers, sizes, biases) is the one that belongs to these weights, and whether all files of the "
            "checkpoint are there. To use the model nevertheless, load it with transformers and pass the loaded model."
        )


def _listed(names: Collection[str], what: str) -> str:
    """'2 tensors missing …: a, b'; '' for none.

    >>> _listed({"b", "a"}, "missing")
    '2 tensors missing (a, b)'
    >>> _listed(["a", "b", "c", "d", "e"], "missing")
    '5 tensors missing (a, b, c and 2 more)'
    """
    if not names:
        return ""
    first = sorted(names)[:_SHOWN]
    more = f" and {len(names) - len(first)} more" if len(names) > len(first) else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} {what} ({', '.join(first)}{more})"


def _shape(size: Collection[int]) -> str:
    return str(list(size))


def _surplus_in_layers(model: nn.Module, unexpected: Collection[str], endings: tuple[str, ...] = _TRAINED) -> list[str]:
    """Tensors with such endings that belong into the model's own lists of layers, prediction modules left out."""
    lists = {found["list"] for key, _ in model.named_parameters() if (found := _NUMBERED.match(key))}
    prefix = getattr(model, "base_model_prefix", "")
    lists |= {key.removeprefix(f"{prefix}.") for key in lists}
    inside = {key: found for key in unexpected if (found := _NUMBERED.match(key)) and found["list"] in lists}
    modules = {(m["list"], m["number"]) for m in inside.values() if m["rest"].startswith(_MODULE_PARTS)}
    return [key for key, m in inside.items() if key.endswith(endings) and (m["list"], m["number"]) not in modules]
