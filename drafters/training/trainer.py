"""The training loop of a head of any family (`train`), and its progress display."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import get_cosine_schedule_with_warmup

from drafters.base import Save
from drafters.errors import TrainingDivergedError
from drafters.training.data import AnswerSet
from drafters.training.files import whole_folder
from drafters.training.lines_of_progress import LinesOfProgress
from drafters.training.objective import (
    Batch,
    BatchLoss,
    Features,
    Objective,
    calibration,
    evaluate_batch,
    held_out_batches,
    training_batches,
)
from drafters.training.state import (
    Learner,
    Measurement,
    Run,
    TrainConfig,
    checkpoint_of,
    keep_evaluation,
    kept,
    kept_evaluation,
    restore,
    restore_head,
    save_checkpoint,
    stalled,
)


class TrainingDisplay(LinesOfProgress):
    """A progress bar with the loss, and a line above it for every measurement. A context manager."""

    def __init__(self, console: Console, steps: int, done: int) -> None:
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"))
        super().__init__(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
        self._steps = self.add_task("training", total=steps, completed=done, loss="-")

    def show(self, **shown: Any) -> None:
        """Show how many optimizer steps are `completed`, or the `loss`."""
        self.update(self._steps, **shown)

    def measurement(self, measured: Measurement, speedup: Speedup | None) -> None:
        """Print one line: held-out acceptance per draft, and what speed-up is predicted of it."""
        per_draft = " ".join(f"{share:.3f}" for share in measured.acceptance)
        pays = "" if speedup is None else f", predicted speed-up {speedup(measured.tau):.2f} ×"
        acceptance = f"held-out acceptance {per_draft} (τ {measured.tau:.2f}{pays})"
        line = f"step {measured.step}: loss {measured.loss:.3f}, {acceptance}"
        for name, row in zip(
            ("confidence", "accepted", "calibrated", "temperatures"), measured.confidence, strict=False
        ):
            line += f", {name} " + " ".join(map("{:.2f}".format, row))
        self.console.print(line, highlight=False, soft_wrap=True)


Speedup = Callable[[float], float]
"""Acceptance length -> predicted speed-up over the target alone."""
Evaluate = Callable[[Any], Mapping[str, float]]
"""Evaluates a trained head, for example by drafting with a real engine: name -> number."""


@dataclass(frozen=True)
class TrainingData:
    """Answers to learn from, and answers to other questions, only to measure on."""

    train: AnswerSet
    held_out: AnswerSet

    def digest(self) -> str:
        """Hash of both sets, 16 hex digits."""
        return hashlib.sha256((self.train.digest() + self.held_out.digest()).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TrainResult:
    """A finished run.

    Attributes:
        folder: folder of the finished head's checkpoint.
        history: every measurement; that of the finished head, usually the last, has its evaluation.
    """

    folder: Path
    history: tuple[Measurement, ...]


def train(
    config: TrainConfig,
    head: Any,
    data: TrainingData,
    features: Features,
    evaluate: Evaluate,
    output: Path,
    console: Console,
    *,
    save: Save[Any],
    objective: Objective | None = None,
    speedup: Speedup | None = None,
) -> TrainResult:
    """Train a head in place; continue from the newest checkpoint in `output`, if any.

    Args:
        head: float32, on the device to train on: a fresh one (see `fresh_eagle3`), or one to continue with.
        features: the target's aux hidden states and logits of a batch, on the head's device.
        evaluate: measures the finished head.
        output: gets checkpoints `step-N` and, at the end, `head`, as `save` writes it.
        console: where progress is shown.
        save: writes a head in the layout of its family. objective: None for the training-time test.
        speedup: shown with each measurement.

    Raises:
        InvalidInputError: a checkpoint in `output` belongs to another run.
        RunFolderError: the checkpoints are damaged, or one cannot be written.
        TrainingDivergedError: the loss or a weight is not finite.
    """
    head.requires_grad_(True).train()
    # Norm weights and biases are not decayed: pulled towards zero they would scale down the normed values.
    matrices = [p for p in head.parameters() if p.dim() >= 2]
    vectors = [p for p in head.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, config.beta2))
    learner = Learner(head, optimizer, get_cosine_schedule_with_warmup(optimizer, config.warmup_steps, config.steps))
    run = Run(output, config, data.digest())
    done, history = restore(run, learner, console)
    if done:
        console.print(f"{done} of {config.steps} steps were made before", highlight=False)
    score = _Scorer(config, head, features, objective or evaluate_batch)
    batches = training_batches(data.train, config.batch_size, config.pad_multiple, config.seed, score.device, done)
    with TrainingDisplay(console, config.steps, done) as display:
        for step in range(done + 1, config.steps + 1):
            if stalled(config, history):
                break
            loss = _optimize(config, learner, score(next(batches)).loss)
            display.show(completed=step)
            measure = _is_due(step, config.held_out_every, config.steps)
            keep = _is_due(step, config.checkpoint_every, config.steps) or (measure and config.patience is not None)
            # Only then, as reading the loss waits for the GPU; and before a checkpoint, so that none is saved from NaN.
            if step % config.log_every == 0 or measure or keep:
                display.show(loss=f"{_finite(loss, step):.3f}")
            if measure:
                history.append(_measure(config, score, data.held_out, step, loss))
                display.measurement(history[-1], speedup)
            if keep:
                save_checkpoint(run, step, learner, history, save)
    result = _finish(run, history, head, console)
    for temperatures in result.confidence[3:]:
        head.calibrate(temperatures)
    with whole_folder(output / "head", manifest=False) as folder:
        save(head.eval(), folder)
    evaluation = _evaluated(evaluate, head, checkpoint_of(run, result.step), console)
    history[history.index(result)] = replace(result, evaluation=evaluation)
    return TrainResult(output / "head", tuple(history))


def _finish(run: Run, history: list[Measurement], head: torch.nn.Module, console: Console) -> Measurement:
    """Give the head the weights that the run keeps, and log it if they are not the last; returns their measurement."""
    result = kept(run.config, history)
    if result is not history[-1]:
        restore_head(run, result.step, head, console)
        steps = f"ended after step {history[-1].step} of {run.config.steps}"
        console.print(f"{steps}; kept is the best head, of step {result.step} (τ {result.tau:.2f})", highlight=False)
    return result


class _Scorer:
    """Scores batches: the target's features, then the objective under the run's precision."""

    def __init__(self, config: TrainConfig, head: Any, features: Features, objective: Objective) -> None:
        self._config = config
        self.head: Any = head
        self._features = features
        self.device = next(head.parameters()).device
        self._autocast = config.bfloat16 and self.device.type == "cuda"
        self._evaluate = torch.compile(objective) if config.compile else objective

    def __call__(self, batch: Batch) -> BatchLoss:
        with torch.no_grad():
            aux_hidden_states, logits = self._features(batch.token_ids, batch.real)
        aux_hidden_states = aux_hidden_states.to(torch.bfloat16 if self._autocast else torch.float32)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            return self._evaluate(
                self.head, batch, aux_hidden_states, logits, self._config.ttt_steps, self._config.decay
            )


def _optimize(config: TrainConfig, learner: Learner, loss: Tensor) -> Tensor:
    """One optimizer step; returns the loss, detached."""
    learner.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(learner.head.parameters(), config.clip)
    learner.optimizer.step()
    learner.scheduler.step()
    return loss.detach()  # the graph behind the loss, and its activations, are freed


def _measure(config: TrainConfig, score: _Scorer, held_out: AnswerSet, step: int, loss: Tensor) -> Measurement:
    head = score.head.eval()
    batches = held_out_batches(held_out, config.batch_size, config.pad_multiple, score.device)
    with torch.no_grad():
        outcomes = [score(batch) for batch in batches]
    head.train()
    accepted = torch.stack([outcome.accepted for outcome in outcomes]).sum(0)
    possible = torch.stack([outcome.possible for outcome in outcomes]).sum(0)
    shares = (accepted / possible.clamp(min=1)).tolist()
    rated = [outcome.rated for outcome in outcomes if outcome.rated is not None]
    confidence = calibration(torch.cat(rated, 1)) if rated else ()
    return Measurement(step, _finite(loss, step), tuple(shares), confidence=confidence)


@torch.no_grad()
def _evaluated(evaluate: Evaluate, head: Any, checkpoint: Path, console: Console) -> Mapping[str, float]:
    """Evaluate the finished head. The result is stored in its checkpoint, for a run killed meanwhile."""
    found = kept_evaluation(checkpoint)
    if found is None:
        console.print("evaluating the finished head", highlight=False)
        found = dict(evaluate(head.eval()))
        keep_evaluation(checkpoint, found)
    if found:
        console.print(", ".join(f"{name} {value:.4g}" for name, value in found.items()), highlight=False)
    return found


def _finite(loss: Tensor, step: int) -> float:
    value = float(loss)
    if not math.isfinite(value):
        raise TrainingDivergedError(f"the loss is {value} at step {step}; lower the learning rate or the clip norm")
    return value


def _is_due(step: int, every: int, last: int) -> bool:
    return step % every == 0 or step == last
