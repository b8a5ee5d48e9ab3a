"""The families of draft heads, one row each. Loading, checks, training and export read this table and name no family.

A new family is a row here and a module with the functions of `FamilyCode`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from attention.errors import InvalidInputError
from drafters.checkpoints.config_fields import FamilyOptions, HeadReport
from drafters.checkpoints.layouts import Layout, layout_of
from drafters.checkpoints.tensor_files import CheckpointPath

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from drafters.base import Head, LazyFacts, Recipe


class FamilyCode(Protocol):
    """What a family's module defines. options: load options of this family that a user gave, by name.

    Two functions only some families have, see `Family.optional`:

    named_target(config) -> the target named by a config.json if the file describes a head of this family; else None.
    other_readings(head, N, rope_theta) -> `drafters.base.OtherReading`s: a head of this family under other readings of
        its files; () of any other head. N: layers of the target. rope_theta: its rotary base or None.
    """

    def load_head(self, path: Any, model: PreTrainedModel, facts: LazyFacts, options: FamilyOptions) -> Head:
        """Load a head for a target, in its dtype and on its device.

        path: its folder, a Path; a loaded model, too, for a family with `takes_models`.
        facts: facts about the target; raises HeadLoadError where its embeddings cannot be shared.

        Raises:
            HeadLoadError, HeadMismatchError: the files are damaged, or of a head for another target.
        """

    def describe_head(self, path: str, options: FamilyOptions) -> HeadReport:
        """Resolve a head by its own files, without a target. Raises InvalidInputError if they do not suffice."""

    def target_of(self, path: CheckpointPath) -> str | None:
        """The target that a head was made for, by its own files; None where they name none.

        Raises:
            HeadLoadError: they cannot be read.
        """

    def not_exportable(self, path: CheckpointPath) -> str | None:
        """Why a head cannot be written in the layout of another project, if it cannot."""

    def recipe(
        self,
        model: PreTrainedModel,
        facts: LazyFacts,
        longest: int,
        seed: int,
        options: FamilyOptions,
    ) -> Recipe[Any]:
        """How a head of this family is trained for a target. options: options of the command `specdec train FAMILY`."""


@dataclass(frozen=True)
class Family:
    """One family of draft heads.

    Attributes:
        name: used in messages. options: load options about reading its files.
        layouts: the checkpoints it reads.
        in_target: value of `draft` for a head inside the target's checkpoint; None if the family has no such heads.
        takes_models: whether its heads are models of transformers, which may be loaded already.
        among_ranks: whether its heads draft for a target that is divided among processes.
        names_targets: whether a head's config.json may name its target; then every load imports the module.
        code: imports its module at the first use.
    """

    name: str
    options: tuple[str, ...]
    layouts: frozenset[Layout]
    code: Callable[[], FamilyCode]
    in_target: str | None = None
    takes_models: bool = False
    among_ranks: bool = True
    names_targets: bool = False

    def optional(self, name: str, *arguments: Any) -> Any:
        """What a function of its module returns that only some families have, see `FamilyCode`; None without it."""
        function = getattr(self.code(), name, None)
        return function and function(*arguments)


def _assistant() -> FamilyCode:
    from drafters.assistant import family

    return family


def _block() -> FamilyCode:
    from drafters.block import family

    return family


def _eagle() -> FamilyCode:
    from drafters.eagle3 import family

    return family


def _mtp() -> FamilyCode:
    from drafters.mtp import family

    return family


_MTP_LAYOUTS = {layout for layout in Layout if layout.name.startswith("MTP_")}
FAMILIES: Mapping[str, Family] = {
    "mtp": Family(
        "a multi-token-prediction module",
        ("mtp_concat", "mtp_feedback"),
        frozenset(_MTP_LAYOUTS - {Layout.MTP_OTHER, Layout.MTP_DSPARK}),
        _mtp,
        in_target="mtp",
    ),
    "assistant": Family(
        "a small draft model",
        (),
        frozenset({Layout.CAUSAL_LM}),
        _assistant,
        takes_models=True,
        among_ranks=False,
    ),
    "block": Family("a block-parallel head", (), frozenset({Layout.DFLASH, Layout.DFLASH2, Layout.DSPARK}), _block),
    "eagle3": Family(
        "an EAGLE head", ("head_overrides",), frozenset(Layout) - _MTP_LAYOUTS, _eagle, names_targets=True
    ),
}
"""Families by the name of `specdec train NAME`. EAGLE's reader also names the layouts that are not supported."""


def family_of(path: str | Path | PreTrainedModel) -> Family:
    """The family whose reader a checkpoint is for, or a loaded model.

    Raises:
        HeadLoadError: the folder or hub model cannot be read.
    """
    if not isinstance(path, (str, Path)):
        return next(family for family in FAMILIES.values() if family.takes_models)
    layout = layout_of(path)
    return next((family for family in FAMILIES.values() if layout in family.layouts), FAMILIES["eagle3"])


def check_options(given: FamilyOptions, family: Family | None, reason: str = "") -> None:
    """Check that options about reading a head's files are given only for a head of their family.

    Args:
        given: options that differ from their defaults. family: of the head loaded from files, or None.
        reason: why no head is loaded from files.

    Raises:
        InvalidInputError: an option belongs to another family.
    """
    for name, value in given.items():
        owner = next(each for each in FAMILIES.values() if name in each.options)
        if owner is not family:
            other = reason if family is None else f"this is {family.name}"
            raise InvalidInputError(
                f"{name}={value!r} says how the files of {owner.name} are read, but {other}; leave it out"
            )
