"""Which of the target's states an EAGLE-3 head reads, from its config.json."""

from __future__ import annotations

from drafters.base import FINAL_NORM
from drafters.checkpoints.config_fields import Config, Field, lookup, read
from drafters.eagle3.formats import AUX_KEYS, BOUNDARIES, OUTPUTS
from drafters.eagle3.overrides import AUX_LAYERS, NESTED_AUX_LAYERS, TARGET_LAYERS, USE_AUX, Eagle3Overrides
from drafters.eagle3.spec import default_aux_layers
from drafters.errors import HeadLoadError, HeadMismatchError

_DEEPSEEK = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa", "glm4_moe_lite")
"""Targets of which SGLang reads nested ids as boundaries unless the first is 1; SpecForge's template of Kimi-K2 has
[2, 30, 58], the default boundaries. A list of boundaries beside them decides.

Source: sgl-project/sglang 0.5.23, models/deepseek_v2.py, glm4_moe_lite.py (set_eagle3_layers_to_capture).
"""


def resolve_aux_layers(config: Config, num_layers: int, overrides: Eagle3Overrides, model_type: str = "") -> Field:
    """Layer boundaries of the aux hidden states. Nested ids name the layer whose output is meant: boundary = id + 1;
    unless the largest id is the number of layers, or the target is one of `_DEEPSEEK`: then, like top-level ids, they
    are boundaries already.

    Args:
        config: the head's, all keys at the top. num_layers: N of the target. model_type: of its text configuration.

    Raises:
        HeadLoadError: no list of numbers, several that disagree, or DeepSpec's with the target's last layer.
        HeadMismatchError: a layer that the target does not have.
    """
    if overrides.aux_layers is not None:
        field = Field("aux_layers", overrides.aux_layers, "chosen by the user")
        _check_aux_layers(config, field, num_layers)
        return field
    used = read(config, "use_aux_hidden_state", bool, *USE_AUX, default=True)
    if not used.value:  # before the list, which is [] beside it as NVIDIA ModelOpt writes it
        return Field("aux_layers", (FINAL_NORM,), used.source)
    listed = _listed_layers(config, num_layers, model_type)
    if len(set(listed.values())) > 1:
        raise HeadLoadError(
            f"config.json names different aux layers: {listed} (as boundaries); choose by head_overrides, as "
            '{"aux_layers": […]}'
        )
    if listed:
        field = Field("aux_layers", next(iter(listed.values())), "config " + ", ".join(listed))
    else:
        field = Field("aux_layers", default_aux_layers(num_layers), "default 2, N//2, N-3")
    _check_aux_layers(config, field, num_layers)
    return field


def _listed_layers(config: Config, num_layers: int, model_type: str) -> dict[str, tuple[int, ...]]:
    listed = {}
    for key, meaning in AUX_KEYS.items():
        ids = lookup(config, key)
        if ids is None:
            continue
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise HeadLoadError(f"config.json: {key} must be a list of layer numbers, not {ids!r}")
        if key == TARGET_LAYERS and max(ids) == num_layers - 1:
            raise HeadLoadError(
                f"config.json: {key} = {ids} has the target's last layer, which transformers returns after the final "
                "norm; DeepSpec's own evaluation does not run such heads either"
            )
        note = ""
        if key == NESTED_AUX_LAYERS and max(ids) == num_layers:
            meaning = BOUNDARIES  # no layer has the number num_layers
        elif key == NESTED_AUX_LAYERS and model_type in _DEEPSEEK and ids[0] != 1 and not lookup(config, AUX_LAYERS):
            meaning, note = BOUNDARIES, f", as SGLang does for {model_type}"
        listed[f"{key} (read as {meaning}{note})"] = tuple(i + 1 for i in ids) if meaning == OUTPUTS else tuple(ids)
    return listed


def _check_aux_layers(config: Config, field: Field, num_layers: int) -> None:
    if max(field.value) > num_layers:
        raise HeadMismatchError(f"the head reads boundaries {field.value}, this target has {num_layers} layers")
    count = lookup(config, "num_aux_hidden_states")
    if count is not None and count != len(field.value):
        raise HeadLoadError(f"config.json says num_aux_hidden_states = {count}, but the aux layers are {field.value}")
