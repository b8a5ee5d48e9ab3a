"""Block-parallel heads as a family of draft heads: the functions of `drafters.families.FamilyCode`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attention.errors import InvalidInputError
from drafters.base import Head, LazyFacts, OtherReading, Recipe
from drafters.checkpoints.config_fields import Config, FamilyOptions, HeadReport
from drafters.checkpoints.tensor_files import CheckpointPath

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from drafters.block.head import BlockParallelHead


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


def named_target(config: Config) -> str | None:
    """None: its config.json names no target."""
    return None


def target_of(path: CheckpointPath) -> str | None:
    """None, see `named_target`."""
    return None


def other_readings(head: Head, num_layers: int, rope_theta: float | None) -> tuple[OtherReading, ...]:
    """None: the training-time test does not run it."""
    return ()


def not_exportable(path: CheckpointPath) -> str | None:
    """Why it is not written in the layout of another project."""
    return (
        "it is a block-parallel head, which other projects read in the layout that it has; HEAD must be an EAGLE-3 head"
    )


def recipe(model: PreTrainedModel, facts: LazyFacts, longest: int, seed: int, options: FamilyOptions) -> Recipe[Any]:
    """Raises InvalidInputError: it is not trained here."""
    raise InvalidInputError("block-parallel heads are not trained here: give an EAGLE-3 head")
