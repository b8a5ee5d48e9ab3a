"""The families of draft heads, one row each. Loading, checks, training and export read this table and name no family.

A new family is a row here and a module with the functions of `FamilyCode`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from attention.errors import InvalidInputError
from drafters.checkpoints.config_fields import Config, HeadReport
from drafters.checkpoints.layouts import Layout, layout_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from drafters.base import Head, OtherReading, Recipe, TargetFacts


class FamilyCode(Protocol):
    """What a family's module defines. options: load options of this family that a user gave, by name."""

    def load_head(
        self, path: Path, model: PreTrainedModel, facts: Callable[[], TargetFacts], options: Mapping[str, Any]
    ) -> Head:
        """Load a head for a target, in its dtype and on its device.

        facts: of the target; raises HeadLoadError where its embeddings cannot be shared.

        Raises:
            HeadLoadError, HeadMismatchError: the files are damaged, or of a head for another target.
        """

    def describe_head(self, path: str, options: Mapping[str, Any]) -> HeadReport:
        """Resolve a head by its own files, without a target. Raises InvalidInputError: they do not say enough."""

    def target_of(self, path: str | Path) -> str | None:
        """The target that a head was made for, by its own files; None where they name none.

        Raises:
            HeadLoadError: they cannot be read.
        """

    def named_target(self, config: Config) -> str | None:
        """The target that a config.json names if it is that of a head of this family; else None."""

    def other_readings(self, head: Head, num_layers: int, rope_theta: float | None) -> tuple[OtherReading, ...]:
        """A head of this family under other readings of its files; () of any other head.

        num_layers: N of the target. rope_theta: of its rotary embedding; None where it has no single one.
        """

    def not_exportable(self, path: str | Path) -> str | None:
        """Why a head cannot be written in the layout of another project, if it cannot."""

    def recipe(
        self,
        model: PreTrainedModel,
        facts: Callable[[], TargetFacts],
        longest: int,
        seed: int,
        options: Mapping[str, Any],
    ) -> Recipe[Any]:
        """How a head of this family is trained for a target. options: of the command `specdec train FAMILY`."""


@dataclass(frozen=True)
class Family:
    """One family of draft heads.

    Attributes:
        name: in messages. options: load options that say how its files are read.
        layouts: the checkpoints it reads.
        in_target: what `draft` says for a head inside the target's own checkpoint; None where there is none.
        code: imports its module at the first use.
    """

    name: str
    options: tuple[str, ...]
    layouts: frozenset[Layout]
    code: Callable[[], FamilyCode]
    in_target: str | None = None


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
        frozenset(_MTP_LAYOUTS - {Layout.MTP_OTHER}),
        _mtp,
        in_target="mtp",
    ),
    "eagle3": Family("an EAGLE head", ("head_overrides",), frozenset(Layout) - _MTP_LAYOUTS, _eagle),
}
"""By the name of `specdec train NAME`. EAGLE's reader also names the layouts that nobody reads."""


def family_of(path: str | Path) -> Family:
    """The family whose reader a checkpoint is for.

    Raises:
        HeadLoadError: the folder or hub model cannot be read.
    """
    layout = layout_of(path)
    return next((family for family in FAMILIES.values() if layout in family.layouts), FAMILIES["eagle3"])


def check_options(given: Mapping[str, Any], family: Family | None, reason: str = "") -> None:
    """Check that options that say how a head's files are read are given for a head of their family alone.

    Args:
        given: those that differ from their defaults. family: of the head that is loaded from files; None without one.
        reason: why there is none.

    Raises:
        InvalidInputError: one is of another family.
    """
    for name, value in given.items():
        owner = next(each for each in FAMILIES.values() if name in each.options)
        if owner is not family:
            other = reason if family is None else f"this is {family.name}"
            raise InvalidInputError(
                f"{name}={value!r} says how the files of {owner.name} are read, but {other}; leave it out"
            )
