"""The settings of a training run, and its checkpoints, from which a killed run goes on and ends with the same head."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from attention.errors import InvalidInputError
from drafters.base import Save
from drafters.checkpoints.tensor_files import Json
from drafters.errors import RunFolderError, TrainingDivergedError
from drafters.training.files import damage, whole_folder, write_file

_STEPS_OF_WARMUP = 30
"""Steps for each of the warm-up."""
RISE = 0.01
"""Tokens by which the acceptance length must rise to count as a rise."""


@dataclass(frozen=True)
class TrainConfig:
    """One run. Two runs with equal configuration, data and device kind give the same head.

    Attributes:
        steps: optimizer steps; the learning rate's cosine ends here. batch_size: sequences per step.
        ttt_steps, decay: steps of the training-time test, or drafts of a block; and the loss weight decay^i of step i.
        learning_rate, warmup_steps, weight_decay, beta2, clip: AdamW (beta1 0.9), linear warm-up (-1: a 30th of the
            steps), gradient norm.
        seed: seed of the batches, which are padded to a multiple of `pad_multiple` tokens (few shapes for a compiler).
        log_every: steps between two readings of the loss (each waits for the device).
        held_out_every: steps between two measurements of held-out acceptance.
        checkpoint_every, keep_checkpoints: steps between two checkpoints, and how many stay.
        patience: the run ends after so many measurements without a rise (`stalled`), and its best head is the result;
            None: all steps are made, and the last head is the result.
        bfloat16: autocast to bfloat16 on CUDA (never on CPU). compile: run the loss through torch.compile.
    """

    steps: int = 1500
    batch_size: int = 48
    ttt_steps: int = 5
    decay: float = 0.8
    learning_rate: float = 1e-3
    warmup_steps: int = -1
    weight_decay: float = 0.01
    beta2: float = 0.95
    clip: float = 1.0
    seed: int = 0
    pad_multiple: int = 64
    log_every: int = 10
    held_out_every: int = 250
    checkpoint_every: int = 250
    keep_checkpoints: int = 2
    bfloat16: bool = True
    compile: bool = False
    patience: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidInputError for values that no run can use."""
        if self.warmup_steps == -1:
            object.__setattr__(self, "warmup_steps", int(self.steps / _STEPS_OF_WARMUP))
        for own in fields(self):
            value = getattr(self, own.name)
            if value is None or isinstance(value, bool) or own.name in ("seed", "warmup_steps", "weight_decay"):
                continue
            if not 0 < value < math.inf:
                raise InvalidInputError(f"{own.name} must be positive and finite, not {value}")
        if self.seed < 0:
            raise InvalidInputError(f"seed must not be negative; given is {self.seed}")
        if self.warmup_steps < 0 or self.weight_decay < 0 or not 0 < self.decay <= 1 or not 0 < self.beta2 < 1:
            raise InvalidInputError(
                f"allowed are warmup_steps >= 0, weight_decay >= 0, 0 < decay <= 1 and 0 < beta2 < 1; given are "
                f"{self.warmup_steps}, {self.weight_decay}, {self.decay} and {self.beta2}"
            )


FREE_SETTINGS = ("log_every", "keep_checkpoints", "checkpoint_every")
"""Settings that may differ between a run and its continuation: they do not change the result."""
_NAME = re.compile(r"step-(\d+)")
_STATE = "trainer.pt"
_EVALUATION = "evaluation.json"
_PARTS = ("step", "data", "head", "optimizer", "scheduler", "history", "rng", "cuda_rng")
"""Keys of the state in trainer.pt."""


@dataclass(frozen=True)
class Measurement:
    """Results after `step` optimizer steps; loss: the loss on that step's batch.

    acceptance: share of held-out chains that are right up to and including draft 1, 2, … evaluation: result of the
    caller's `evaluate` for the finished head. confidence: see `objective.calibration`; () of a head without confidence.
    """

    step: int
    loss: float
    acceptance: tuple[float, ...]
    evaluation: Mapping[str, float] = field(default_factory=dict)
    confidence: tuple[tuple[float, ...], ...] = ()

    @property
    def tau(self) -> float:
        """Tokens per verification for chains as long as the training-time test, bonus token included."""
        return 1.0 + sum(self.acceptance)


def stalled(config: TrainConfig, history: Sequence[Measurement]) -> bool:
    """Whether none of the last `patience` measurements has an acceptance length more than RISE above all before them.

    >>> taus = [Measurement(step, 0.0, (share,)) for step, share in enumerate((0.3, 0.5, 0.505, 0.4))]
    >>> [stalled(TrainConfig(patience=2), taus[:count]) for count in (1, 2, 3, 4)]
    [False, False, False, True]
    """
    if config.patience is None or len(history) <= config.patience:
        return False
    best = kept(config, history).tau
    return any(m.tau + RISE >= best for m in history[: -config.patience])


def kept(config: TrainConfig, history: Sequence[Measurement]) -> Measurement:
    """The measurement of the head that is the result so far: with `patience` the best one, else the last."""
    return history[-1] if config.patience is None else max(history, key=lambda measured: measured.tau)


@dataclass(frozen=True)
class Learner:
    """Everything in a run that has state."""

    head: Any
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler


@dataclass(frozen=True)
class Run:
    """What a checkpoint must agree with to be continued.

    Attributes:
        folder: folder of the checkpoints; config: the run's; data: digest of the answers for training and evaluation.
    """

    folder: Path
    config: TrainConfig
    data: str


def save_checkpoint(run: Run, step: int, learner: Learner, history: list[Measurement], save: Save[Any]) -> None:
    """Write step-N into the run's folder, whole or not at all: the head in its layout, and trainer.pt. Deletes old
    ones, but with `patience` not the best head's.

    Raises:
        TrainingDivergedError: a weight is not finite; nothing is written.
        RunFolderError: it cannot be written; earlier checkpoints stay.
    """
    broken = [name for name, parameter in learner.head.named_parameters() if not torch.isfinite(parameter).all()]
    if broken:
        raise TrainingDivergedError(
            f"after step {step} these weights are NaN or infinite: {', '.join(broken)}; lower the learning rate or the "
            "clip norm"
        )
    state = {
        "step": step,
        "data": run.data,
        "head": learner.head.state_dict(),
        "optimizer": learner.optimizer.state_dict(),
        "scheduler": learner.scheduler.state_dict(),
        "history": [asdict(measurement) for measurement in history],
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    try:
        with whole_folder(checkpoint_of(run, step)) as partial:
            save(learner.head, partial)
            with (partial / _STATE).open("wb") as out:
                torch.save(state, out)
    except RunFolderError as error:
        found = checkpoints(run.folder)
        last = f"the last good checkpoint is {found[-1].name}" if found else "there is no checkpoint yet"
        raise RunFolderError(f"{error}; {last}, the same command goes on from there") from error
    best = None if run.config.patience is None else checkpoint_of(run, kept(run.config, history).step)
    for old in checkpoints(run.folder)[: -run.config.keep_checkpoints]:
        if old != best:
            shutil.rmtree(old)


def checkpoint_of(run: Run, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return run.folder / f"step-{step:07d}"


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in `folder`, oldest first."""
    found = {match: path for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))}
    return [path for _, path in sorted(found.items(), key=lambda item: int(item[0].group(1)))]


def restore(run: Run, learner: Learner, console: Console) -> tuple[int, list[Measurement]]:
    """Load the newest undamaged checkpoint into `learner`; returns its step and measurements. Without one: (0, []).

    Damaged checkpoints are named on `console` and renamed to step-N.damaged.

    Raises:
        InvalidInputError: the checkpoint is of a run on other answers. (Who starts a run compares its other settings.)
        RunFolderError: checkpoints exist, and all are damaged.
    """
    found = checkpoints(run.folder)
    if not found:
        return 0, []
    path, state = _newest_good(found, console)
    if state["data"] != run.data:
        raise InvalidInputError(
            f"{path} learned from other answers ({state['data']} -> {run.data}); use those, or another output folder"
        )
    learner.head.load_state_dict(state["head"])
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])
    if torch.cuda.is_available() and state["cuda_rng"]:
        torch.cuda.set_rng_state_all(state["cuda_rng"])
    return state["step"], [Measurement(**measurement) for measurement in state["history"]]


def restore_head(run: Run, step: int, head: torch.nn.Module, console: Console) -> None:
    """Load the weights of a step's checkpoint into `head`. Raises RunFolderError: it is damaged or missing."""
    _, state = _newest_good([checkpoint_of(run, step)], console)
    head.load_state_dict(state["head"])


def keep_evaluation(checkpoint: Path, evaluation: Mapping[str, float]) -> None:
    """Write the finished head's evaluation into its checkpoint. Raises RunFolderError: it cannot be written."""
    write_file(checkpoint / _EVALUATION, (json.dumps(dict(evaluation)) + "\n").encode())


def kept_evaluation(checkpoint: Path) -> dict[str, float] | None:
    """The evaluation written by `keep_evaluation`; None if no readable file exists."""
    try:
        found = json.loads((checkpoint / _EVALUATION).read_bytes())
    except (OSError, ValueError):
        return None
    numbers = isinstance(found, dict) and all(isinstance(value, (int, float)) for value in found.values())
    return found if numbers else None


def _newest_good(found: list[Path], console: Console) -> tuple[Path, Json]:
    broken: list[tuple[Path, str]] = []
    for path in reversed(found):
        reason = damage(path)
        if reason is None:
            state, reason = _read_state(path / _STATE)
        if reason is None:
            for bad, fault in broken:
                aside = bad.with_name(f"{bad.name}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(bad, aside)
                line = f"checkpoint {bad.name} is damaged ({fault}) and kept as {aside.name}"
                console.print(f"{line}; the run goes on from {path.name}", highlight=False, soft_wrap=True)
            return path, state
        broken.append((path, reason))
    listed = "; ".join(f"{path}: {reason}" for path, reason in broken)
    raise RunFolderError(
        f"every checkpoint is damaged ({listed}); give another --output, or --overwrite to start anew there"
    )


def _read_state(file: Path) -> tuple[Json, str | None]:
    """(state, None), or ({}, reason why it cannot be read)."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:  # torch.load's errors on a damaged file
        return {}, f"{file.name} cannot be read: {error}"
    missing = [name for name in _PARTS if name not in state] if isinstance(state, dict) else list(_PARTS)
    return ({}, f"{file.name} lacks {', '.join(missing)}") if missing else (state, None)
