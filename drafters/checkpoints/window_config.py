"""Sliding windows of a head's layers, from its config.json."""

from __future__ import annotations

from drafters.checkpoints.config_fields import Config, Field, lookup, read
from drafters.errors import HeadLoadError


def resolve_windows(config: Config, num_layers: int) -> list[Field]:
    """Which layers have a sliding window, and its length. `layer_types` says it; `sliding_window` alone does not, as
    configurations copied from a target have it for layers that never use it.

    Raises:
        HeadLoadError: another kind of layer, another number of layers, or a window that no layer is said to have.
    """
    kinds, window = lookup(config, "layer_types"), lookup(config, "sliding_window")
    if kinds is None and lookup(config, "use_sliding_window") and window is not None:
        raise HeadLoadError(
            f"config.json says use_sliding_window = true (of {window}) and not which layers have it: give "
            "head_overrides layer_types=['sliding_attention'] (one word a layer), or use_sliding_window=false for none"
        )
    kinds = ["full_attention"] * num_layers if kinds is None else kinds
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        raise HeadLoadError(f"config.json: layer_types must be a list of {' and '.join(known)}, not {kinds!r}")
    near = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    if near and len(kinds) != num_layers:
        raise HeadLoadError(
            f"config.json says layer_types = {kinds}, but the head has {num_layers} layer(s): give head_overrides "
            "layer_types with one word for each"
        )
    if not near:
        return [Field("windowed_layers", (), "no layer_types with a window"), Field("window", None, "no such layer")]
    return [Field("windowed_layers", near, "config layer_types"), read(config, "window", int, "sliding_window")]
