"""Checkpoints of a training run: a killed run goes on where it was and ends with the same head."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from attention.errors import InvalidInputError
from drafters.eagle3.head import Eagle3Head
from drafters.mtp.head import MtpHead
from drafters.training.config import TrainConfig

TrainedHead = TypeVar("TrainedHead", Eagle3Head, MtpHead)
Save = Callable[[TrainedHead, Path], Path]
"""Writes a head into a folder, in the layout that its loader reads; returns the folder."""

_FREE = ("log_every", "keep_checkpoints", "checkpoint_every")
"""Settings that may differ between a run and its continuation: they do not touch the result."""
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Measurement:
    """What was measured after `step` optimizer steps.

    Attributes:
        loss: of the step's batch.
        acceptance: share of held-out chains that are right up to and including draft 1, 2, …
        evaluation: what the caller's `evaluate` said.
    """

    step: int
    loss: float
    acceptance: tuple[float, ...]
    evaluation: Mapping[str, float] = field(default_factory=dict)

    @property
    def tau(self) -> float:
        """Tokens per target pass that chains as long as the training-time test would give, root included."""
        return 1.0 + sum(self.acceptance)


@dataclass(frozen=True)
class Learner(Generic[TrainedHead]):
    """Everything with state in a run."""

    head: TrainedHead
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler


def save_checkpoint(
    folder: Path,
    step: int,
    config: TrainConfig,
    learner: Learner[TrainedHead],
    history: list[Measurement],
    save: Save[TrainedHead],
) -> Path:
    """Write folder/step-N, whole or not at all: the head in its checkpoint layout, and trainer.pt. Old ones go.

    Returns:
        The checkpoint's folder.
    """
    final = folder / f"step-{step:07d}"
    partial = folder / f"{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    save(learner.head, partial)
    state = {
        "step": step,
        "config": asdict(config),
        "head": learner.head.state_dict(),
        "optimizer": learner.optimizer.state_dict(),
        "scheduler": learner.scheduler.state_dict(),
        "history": [asdict(measurement) for measurement in history],
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    torch.save(state, partial / "trainer.pt")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    for old in checkpoints(folder)[: -config.keep_checkpoints]:
        shutil.rmtree(old)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first."""
    found = {match: path for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))}
    return [path for _, path in sorted(found.items(), key=lambda item: int(item[0].group(1)))]


def restore(folder: Path, config: TrainConfig, learner: Learner[TrainedHead]) -> tuple[int, list[Measurement]]:
    """Put the newest checkpoint's state into `learner`; without a checkpoint nothing changes.

    Returns:
        Steps already made and what was measured so far.

    Raises:
        InvalidInputError: the checkpoint is of a run with another configuration or another head.
    """
    found = checkpoints(folder)
    if not found:
        return 0, []
    state = torch.load(found[-1] / "trainer.pt", map_location="cpu", weights_only=True)
    _check_same_run(found[-1], state, config, learner.head)
    learner.head.load_state_dict(state["head"])
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])
    if torch.cuda.is_available() and state["cuda_rng"]:
        torch.cuda.set_rng_state_all(state["cuda_rng"])
    return state["step"], [Measurement(**measurement) for measurement in state["history"]]


def _check_same_run(path: Path, state: dict[str, Any], config: TrainConfig, head: torch.nn.Module) -> None:
    now = asdict(config)
    differing = {
        name: (value, now.get(name))
        for name, value in state["config"].items()
        if name not in _FREE and value != now.get(name)
    }
    if differing:
        raise InvalidInputError(
            f"{path} is of a run with other settings, (then, now): {differing}. Use those, or another output folder."
        )
    shapes = {name: tensor.shape for name, tensor in head.state_dict().items()}
    if shapes != {name: tensor.shape for name, tensor in state["head"].items()}:
        raise InvalidInputError(f"{path} holds a head of another shape; use another output folder")
