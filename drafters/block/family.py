"""Block-parallel heads as a family of draft heads: the functions of `drafters.families.FamilyCode`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from attention.errors import InvalidInputError
from drafters.base import FINAL_NORM, Head, LazyFacts, OtherReading, Recipe
from drafters.checkpoints.config_fields import FamilyOptions, HeadReport
from drafters.checkpoints.tensor_files import CheckpointPath, locate, read_json
from drafters.eagle3.formats import target_named_by

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from drafters.block.head import BlockParallelHead
    from drafters.block.spec import BlockSpec
    from drafters.eagle3.family import Change

_MOST_RANK = 256
"""The rank of released Markov heads, of targets whose width is 2048 and more."""


def load_head(
    path: CheckpointPath, model: PreTrainedModel, facts: LazyFacts, options: FamilyOptions
) -> BlockParallelHead:
    """Load the head for a target, in its dtype and on its device; errors: see `load_block`."""
    from drafters.block.checkpoint import load_block  # late: the head check asks every family for other readings

    return load_block(path, facts(), model.dtype, model.device)


def describe_head(path: CheckpointPath, options: FamilyOptions) -> HeadReport:
    """Resolve the head by its own files, without a target; errors: see `describe_block`."""
    from drafters.block.checkpoint import describe_block  # late: as above

    return describe_block(path)


def target_of(path: CheckpointPath) -> str | None:
    """The target that config.json names, as speculators and DeepSpec write it. Raises HeadLoadError: no such file."""
    return target_named_by(read_json(locate(path) / "config.json"))


def not_exportable(path: CheckpointPath) -> str | None:
    """Why it is not written in a layout of EAGLE heads; `export_block` writes its own."""
    return "it is a block-parallel head: give --layout z-lab or speculators, and --target"


def other_readings(head: Head, num_layers: int, rope_theta: float | None) -> tuple[OtherReading, ...]:
    """A block-parallel head in the other layout, and with other aux layers as an EAGLE head; () of any other head.

    The variants share its tensors.
    """
    from drafters.block.head import BlockParallelHead
    from drafters.eagle3.family import readings_of

    if not isinstance(head, BlockParallelHead):
        return ()
    return readings_of(head, _changes(head.spec, num_layers, str(head.checkpoint_report)), in_config=True)


def _changes(spec: BlockSpec, num_layers: int, report: str) -> Iterator[Change]:
    """As those of EAGLE heads, with keys of config.json."""
    from drafters.block.formats import AUX, AUX_COUNTED
    from drafters.eagle3.family import other_aux_layers

    is_other = spec.slots == "fill-in"
    if spec.block_size > 1:
        slots = "anchor-first" if is_other else "fill-in"
        cause = "sample_from_anchor is absent or wrong, and readers differ in its default"
        yield f"{slots} slots", "slots", slots, {"sample_from_anchor": is_other}, cause
    key, first, last = AUX, 1, FINAL_NORM
    if AUX_COUNTED in report:
        key, first, last = AUX_COUNTED, 0, num_layers
    layers = tuple(b % (num_layers + 1) for b in spec.aux_layers)  # -1, FINAL_NORM, is N
    for name, moved, cause in other_aux_layers(layers, num_layers):
        own = tuple(last if b == num_layers else b for b in moved)
        yield name, "aux_layers", own, {key: [b - first for b in moved]}, cause


def recipe(
    model: PreTrainedModel, facts: LazyFacts, longest: int, seed: int, options: FamilyOptions
) -> Recipe[BlockParallelHead]:
    """Train a new DFlash or DSpark head on the target's whole vocabulary.

    options: see `new_spec`; and num_anchors, blocks of a sequence in a step.

    Raises:
        InvalidInputError: no head can have this shape. HeadLoadError: the target has no output embedding.
    """
    from drafters.block.checkpoint import fresh_block, save_block
    from drafters.training.blocks import LOSSES, evaluate_blocks

    target, anchors = facts(), options["num_anchors"]
    spec = new_spec(model, target.vocab_size, longest, options)
    shape = "num_layers", "intermediate_size", "aux_layers", "block_size", "slots", "mask_token_id"
    names = (*shape, "markov_rank", "confidence")
    return Recipe(
        aux_layers=spec.aux_layers,
        settings={name: getattr(spec, name) for name in names} | {"kind": options["kind"], "num_anchors": anchors},
        start=lambda counts: fresh_block(spec, target, seed),
        finished=lambda head: copy.deepcopy(head).to(model.dtype).eval(),  # a copy: .to() casts a module in place
        save=partial(save_block, num_target_layers=target.num_layers, num_anchors=anchors),
        objective=partial(evaluate_blocks, num_anchors=anchors, weights=LOSSES[options["kind"]]),
    )


def new_spec(model: PreTrainedModel, vocab_size: int, longest: int, options: FamilyOptions) -> BlockSpec:
    """The spec of a new head, with attention and MLP as of a new EAGLE-3 head (`drafters.eagle3.family.new_spec`).

    Args:
        longest: sequence that the target is loaded for, in tokens.
        options: kind ("dflash", "dspark"), num_drafts, num_layers; slots (None for the kind's own), mask_token_id (None
            for V-1), markov_rank (of "dspark"; None for H/4, at most 256), confidence (of "dspark": with a confidence
            head), aux_layers and intermediate_size.

    Raises:
        InvalidInputError: no head can have this shape, or a plain head is given what DSpark's have.
    """
    from drafters.block.spec import BlockSpec
    from drafters.eagle3.family import new_spec as new_eagle3
    from drafters.layer_spec import LayerSpec

    shared = new_eagle3(model, vocab_size, longest, {**options, "draft_vocab_size": None})
    dspark = options["kind"] == "dspark"
    slots: Any = options.get("slots") or ("anchor-first" if dspark else "fill-in")
    rank = options.get("markov_rank")
    if rank and not dspark:
        raise InvalidInputError(f"markov_rank={rank}: a dflash head has no Markov head; leave it out, or take dspark")
    rates = options.get("confidence")
    if rates and not dspark:
        raise InvalidInputError("confidence=True: a dflash head has no confidence head; leave it out, or take dspark")
    if rank is None:
        rank = min(-(-shared.hidden_size // 4), _MOST_RANK) if dspark else 0
    mask = options.get("mask_token_id")
    return BlockSpec(
        **{each.name: getattr(shared, each.name) for each in fields(LayerSpec)}
        | {"num_layers": options["num_layers"], "qk_norm": True, "own_lm_head": False},
        block_size=options["num_drafts"] + (slots == "fill-in"),
        slots=slots,
        mask_token_id=vocab_size - 1 if mask is None else mask,
        markov="vanilla" if dspark else None,
        markov_rank=rank,
        confidence="outputs and tokens" if rates else None,
    )
