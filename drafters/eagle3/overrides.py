"""Overrides of a head's config.json by the user: keys that are replaced before the file is interpreted."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attention.toml_tables import read_tables
from drafters.base import Layers
from drafters.checkpoints.config_fields import FamilyOptions, PlacedConfig
from drafters.errors import HeadLoadError

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
NESTED_AUX_LAYERS = "eagle_config." + AUX_LAYERS
TARGET_LAYERS = "target_layer_ids"
USE_AUX = ("eagle_config.use_aux_hidden_state", "use_aux_hidden_state")
LM_HEAD_FLAG = "reuse_target_lm_head"
UNSUPPORTED = ("additional_fc", "eagle_config.eh_proj_before_attn")
"""Flags of unsupported EAGLE-3 features: SpecForge's second fc, TensorRT-LLM's early projection."""
PARALLEL_DRAFT_STEP = ("parallel_draft_step", "eagle_config.parallel_draft_step")
MTP_LAYERNORM = ("use_mtp_layernorm", "eagle_config.use_mtp_layernorm")

KEYS = tuple[str, ...](read_tables("drafters", "eagle3/keys.toml")["read"])
"""The keys of config.json that decide how an EAGLE-3 head is read, wherever in the file they lie."""
_FEEDBACK = ("pre_norm", "post_norm")


@dataclass(frozen=True)
class Eagle3Overrides:
    """Choices that a user makes against a checkpoint's own configuration (older exporters wrote them wrong).

    Attributes:
        aux_layers: numbered as in specdec, or None for the checkpoint's.
        feedback: the state that is fed back, or None for the checkpoint's.
        config: (key of config.json, value), the key dotted where it is nested; None as value removes the key.
    """

    aux_layers: Layers | None = None
    feedback: Literal["pre_norm", "post_norm"] | None = None
    config: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, given: FamilyOptions) -> Eagle3Overrides:
        """The overrides that a user named: `aux_layers`, `feedback`, or keys of config.json.

        Raises:
            HeadLoadError: a name that decides nothing, or a value of another type.
        """
        known = ("aux_layers", "feedback", *KEYS)
        odd = [key for key in given if key not in known and not key.startswith(("rope_scaling.", "rope_parameters."))]
        if odd:
            near = difflib.get_close_matches(odd[0], known, n=1)
            hint = f" (is {near[0]} meant?)" if near else ""
            raise HeadLoadError(f"head_overrides: {odd[0]!r} decides nothing{hint}; known are {', '.join(known)}")
        return cls(
            _aux_layers(given.get("aux_layers")),
            _feedback(given.get("feedback")),
            tuple((key, value) for key, value in given.items() if key not in ("aux_layers", "feedback")),
        )

    def applied(self, config: PlacedConfig) -> PlacedConfig:
        """config.json with these keys replaced."""
        changed = dict(config)
        origins = dict(config.origins)
        for key, value in self.config:
            origins[key] = f"{key} (chosen by the user)"
            place = changed
            (*parents, last) = key.split(".")
            for parent in parents:
                inner = place.get(parent)
                place[parent] = dict(inner) if isinstance(inner, Mapping) else {}
                place = place[parent]
            place[last] = value
        return PlacedConfig(changed, origins)


def _aux_layers(given: Any) -> Layers | None:
    if given is None:
        return None
    layers = tuple(given) if isinstance(given, (list, tuple)) else ()
    if not layers or not all(type(layer) is int for layer in layers):
        raise HeadLoadError(f"head_overrides: aux_layers={given!r}: give a list of layer numbers, as [2, 16, 29]")
    return layers


def _feedback(given: Any) -> Literal["pre_norm", "post_norm"] | None:
    if given is not None and given not in _FEEDBACK:
        raise HeadLoadError(f"head_overrides: feedback={given!r}: allowed are {', '.join(_FEEDBACK)}")
    return given
