"""EAGLE heads as a family of draft heads: the functions of `drafters.families.FamilyCode`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from math import gcd
from typing import Any

from transformers import PreTrainedModel

from drafters.base import FINAL_NORM, Head, Layers, LazyFacts, OtherReading, Recipe
from drafters.checkpoints.config_fields import FamilyOptions, HeadReport
from drafters.checkpoints.layouts import Layout
from drafters.checkpoints.tensor_files import CheckpointPath, Json, read_json
from drafters.eagle3.checkpoint import (
    check_kind,
    describe_eagle,
    fresh_eagle3,
    load_eagle,
    open_head,
    save_eagle3,
    target_of_files,
)
from drafters.eagle3.formats import target_named_by as named_target
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.overrides import Eagle3Overrides
from drafters.eagle3.spec import Eagle3Spec, default_aux_layers
from drafters.rope import RopeSpec

Change = tuple[str, str, Any, Json, str]
"""Its name, the field of the spec, its other value, the `overrides` of the reading, and the cause."""


def load_head(path: CheckpointPath, model: PreTrainedModel, facts: LazyFacts, options: FamilyOptions) -> Eagle3Head:
    """Load the head for a target, in its dtype and on its device.

    Raises:
        HeadLoadError, HeadMismatchError: see `load_eagle`, and `Eagle3Overrides.of` for head_overrides.
    """
    overrides = Eagle3Overrides.of(options.get("head_overrides", {}))
    return load_eagle(path, facts(), model.dtype, model.device, overrides)


def describe_head(path: CheckpointPath, options: FamilyOptions) -> HeadReport:
    """Resolve the head by its own files, without a target.

    Raises:
        HeadLoadError, HeadMismatchError: as `load_head`, or its aux layers depend on the target.
    """
    overrides = Eagle3Overrides.of(options.get("head_overrides", {}))
    return describe_eagle(path, target_of_files(path, overrides), overrides)


def target_of(path: CheckpointPath) -> str | None:
    """The target that a head was made for, by its own config.json; None where that names none.

    Raises:
        HeadLoadError: the folder or hub model, or its config.json, cannot be read, or no loader here reads the kind of
            head that this names.
    """
    return named_target(read_json(check_kind(path) / "config.json"))


def not_exportable(path: CheckpointPath) -> str | None:
    """Why a head cannot be written in the layout of another project; None where it is an EAGLE-3 head."""
    if open_head(path).layout is Layout.EAGLE1:
        return "it is an EAGLE-1 or EAGLE-2 head, which neither layout holds; give an EAGLE-3 head"
    return None


def recipe(
    model: PreTrainedModel, facts: LazyFacts, longest: int, seed: int, options: FamilyOptions
) -> Recipe[Eagle3Head]:
    """Train a new EAGLE-3 head.

    Args:
        longest: sequence that the target is loaded for, in tokens.
        options: draft_vocab_size (Vd, None for V), intermediate_size (None for the target's) and aux_layers (None for
            2, N//2, N-3).

    Raises:
        InvalidInputError: no head can have this shape. HeadLoadError: the target has no output embedding.
    """
    target = facts()
    spec = new_spec(model, target.vocab_size, longest, options)
    return Recipe(
        aux_layers=spec.aux_layers,
        settings={name: getattr(spec, name) for name in ("draft_vocab_size", "intermediate_size", "aux_layers")},
        start=lambda counts: fresh_eagle3(spec, target, counts(spec.vocab_size), seed),
        finished=lambda head: copy.deepcopy(head).to(model.dtype).eval(),  # a copy: .to() casts a module in place
        save=save_eagle3,
    )


def new_spec(model: PreTrainedModel, vocab_size: int, longest: int, options: FamilyOptions) -> Eagle3Spec:
    """The spec of a new head for a target: heads, head dim, rope base and eps as the target has them.

    A target without attention (Mamba) gives none of these: the head has heads of up to 128 and an MLP of four times its
    width then, and positions up to `longest`. options: see `recipe`.
    """
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    hidden = config.hidden_size
    heads, kv_heads, head_dim = _attention_shape(config)
    return Eagle3Spec(
        hidden_size=hidden,
        target_hidden_size=hidden,
        intermediate_size=options.get("intermediate_size") or getattr(config, "intermediate_size", None) or 4 * hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        draft_vocab_size=options.get("draft_vocab_size") or vocab_size,
        aux_layers=options.get("aux_layers") or default_aux_layers(config.num_hidden_layers),
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        rope=RopeSpec(
            theta=float(rope.get("rope_theta", 10000.0)),
            max_positions=getattr(config, "max_position_embeddings", None) or longest,
        ),
    )


def _attention_shape(config: Any) -> tuple[int, int, int]:
    """Query heads, KV heads and head dim of a new head; in a Mamba's config head_dim is the state's."""
    heads: int | None = getattr(config, "num_attention_heads", None)
    if heads is None:
        head_dim = gcd(config.hidden_size, 128)
        return config.hidden_size // head_dim, config.hidden_size // head_dim, head_dim
    return (
        heads,
        getattr(config, "num_key_value_heads", heads),
        getattr(config, "head_dim", None) or config.hidden_size // heads,
    )


def other_readings(head: Head, num_layers: int, rope_theta: float | None) -> tuple[OtherReading, ...]:
    """An EAGLE-3 head under every other reading of its files: single choices that exporters make differently.

    The variants share its tensors. EAGLE-1 heads and heads of other families have none.

    Args:
        num_layers: N of the target. rope_theta: the target's rotary base; None where it has no single base.
    """
    if type(head) is not Eagle3Head:  # nor of EAGLE-1
        return ()
    return readings_of(head, _changes(head.spec, num_layers, rope_theta))


def readings_of(head: Any, changes: Iterable[Change], in_config: bool = False) -> tuple[OtherReading, ...]:
    """A head under each change of its spec that changes anything.

    head: a `drafters.eagle3.head.SharingHead`. in_config: see `OtherReading`.
    """
    found = dict[str, OtherReading]()
    for name, field, value, overrides, cause in changes:
        other = replace(head.spec, **{field: value})
        if other != head.spec and str(value) not in found:
            found[str(value)] = OtherReading(name, field, cause, overrides, head.reread(other), in_config)
    return tuple(found.values())


def _changes(spec: Eagle3Spec, num_layers: int, rope_theta: float | None) -> Iterator[Change]:
    for name, layers, cause in other_aux_layers(spec.aux_layers, num_layers):
        yield name, "aux_layers", layers, {"aux_layers": list(layers)}, cause
    feedback = "pre_norm" if spec.feedback == "post_norm" else "post_norm"
    cause = "norm_output says otherwise than the head was trained" + (
        " (SpecForge wrote true for heads trained with the state before the norm)" if feedback == "pre_norm" else ""
    )
    yield f"{feedback} state fed back", "feedback", feedback, {"feedback": feedback}, cause
    key = "norm_before_residual"
    other = not spec.norm_before_residual
    cause = f"{key} is absent or wrong, and readers differ in its default"
    yield f"{key} = {str(other).lower()}", key, other, {key: other}, cause
    if rope_theta is not None and spec.rope.kind == "default":
        cause = "rope_theta is absent or wrong in the head's configuration; the target's fits"
        overrides = {"rope_theta": rope_theta, "rope_scaling": None, "rope_parameters": None}
        yield f"rope_theta {rope_theta:g}", "rope", replace(spec.rope, theta=rope_theta), overrides, cause


def other_aux_layers(layers: Layers, num_layers: int) -> Iterator[tuple[str, Layers, str]]:
    """All layers one later or earlier, the default ones, and each layer alone one later or earlier."""
    if layers == (FINAL_NORM,):
        return
    outputs = "the aux layers were given as layers whose output is meant (SpecForge, SGLang), and taken for aux layers"
    numbered = (
        "the aux layers were given as numbered here (vLLM, speculators), and taken for layers whose output is meant"
    )
    default = (2, num_layers // 2, num_layers - 3)
    wanted = [
        ("all aux layers one later", tuple(layer + 1 for layer in layers), outputs),
        ("all aux layers one earlier", tuple(layer - 1 for layer in layers), numbered),
        ("the default aux layers", default, "the head was trained on the default aux layers, 2, N//2, N-3"),
    ]
    for place, layer in enumerate(layers):
        for by, word in ((1, "later"), (-1, "earlier")):
            moved = (*layers[:place], layer + by, *layers[place + 1 :])
            wanted.append((f"aux layer {layer} one {word}", moved, f"aux layer {layer} is wrong"))
    for name, other, cause in wanted:
        ascending = all(a < b for a, b in pairwise(other))
        if len(other) == len(layers) and ascending and other[0] >= 0 and other[-1] <= num_layers:
            yield name, other, cause
