"""TrainingPlan: a run that was checked before the target answers anything."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Generic

from rich.console import Console

from drafters.base import Head
from drafters.training.answers import AnswerSet
from drafters.training.config import TrainConfig
from drafters.training.objective import Features
from drafters.training.state import FREE_SETTINGS, Save, TrainedHead
from drafters.training.trainer import TrainingData, TrainResult, train
from specdec.errors import InvalidInputError
from specdec.interrupts import interrupts_as_they_are
from specdec.model import SpeculativeModel
from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import pool_requests
from specdec.training.answering import Questions
from specdec.training.run_folder import Setting, claim, locked, release
from specdec.wrapped.fingerprint import target_fingerprint

_EVALUATED_PROMPTS = 64
_EVALUATED_TOKENS = 512


@dataclass(frozen=True)
class TrainingPlan(Generic[TrainedHead]):
    """A checked run, which can begin once there are answers.

    Attributes:
        model: the target, without a head.
        config: of the run; held_out: answers that only measure.
        settings: what decides the result, besides the answers.
        start: the answers to learn from -> the head to train.
        features: the target's states and logits of a batch.
        finished: the trained head as an engine loads it.
        save: writes a head in the layout of its family.
    """

    model: SpeculativeModel
    config: TrainConfig
    held_out: int
    settings: Mapping[str, Setting]
    start: Callable[[AnswerSet], TrainedHead]
    features: Features
    finished: Callable[[TrainedHead], Head]
    save: Save[TrainedHead]

    def check_questions(self, questions: Sequence[Questions]) -> None:
        """Raises InvalidInputError when too few questions can be used, or none for as many drafts as are trained."""
        room = [each.room[i] for each in questions for i in each.usable]
        if not 0 < self.held_out < len(room):
            raise InvalidInputError(
                f"of {len(room)} usable questions, 1 to {len(room) - 1} can be held out, not held_out={self.held_out}; "
                "give more questions or hold out fewer"
            )
        if max(room) <= self.config.ttt_steps:
            raise InvalidInputError(
                f"ttt_steps={self.config.ttt_steps} needs answers of {self.config.ttt_steps + 1} tokens (a bonus token "
                f"and as many drafts); by max_new_tokens and max_length, the longest can have {max(room)}"
            )

    def claim(self, output: Path, data: Mapping[str, Setting], *, overwrite: bool = False) -> None:
        """Make `output` the folder of this run, or find that it is already.

        Args:
            data: what the answers come from.
            overwrite: remove checkpoints and head of whatever run is there, this one included; answers stay.

        Raises:
            InvalidInputError, RunFolderError: see `specdec.training.run_folder.claim`.
        """
        if overwrite:
            for folder in _results(output):
                shutil.rmtree(folder)
            release(output)
        claim(output, {**self.settings, **data}, _results(output))

    @interrupts_as_they_are()
    def run(self, answers: AnswerSet, output: Path, console: Console) -> TrainResult:
        """Train; goes on from the newest checkpoint in `output`.

        Raises:
            InvalidInputError: too few answers, or none long enough.
            RunFolderError: another process trains there, or something there is damaged or cannot be written.
            TrainingDivergedError: the loss or a weight is not finite.
        """
        training, measured = answers.split(self.held_out, self.config.seed)
        longest = int((training.lengths - training.answer_starts).max())
        if longest <= self.config.ttt_steps:
            raise InvalidInputError(
                f"the longest answer has {longest} tokens; ttt_steps={self.config.ttt_steps} needs one of "
                f"{self.config.ttt_steps + 1}"
            )
        data = TrainingData(training, measured)
        evaluate = _evaluation(self.model, measured, self.config.ttt_steps, self.finished)
        with locked(output):
            head = self.start(training)
            return train(self.config, head, data, self.features, evaluate, output, console, save=self.save)


def common_settings(model: SpeculativeModel, family: str, config: TrainConfig, held_out: int) -> dict[str, Setting]:
    """What decides the result for every family of heads."""
    described = model.describe()
    values = {
        "head": Setting(family),
        "target": Setting(target_fingerprint(model.hf_model), str(described["target"])),
        "dtype": Setting(str(model.dtype).removeprefix("torch.")),
        "device": Setting(model.device.type),
        "backend": Setting(model.backend_name),
        "held_out": Setting(held_out),
    }
    return values | {name: Setting(value) for name, value in asdict(config).items() if name not in FREE_SETTINGS}


def _results(output: Path) -> list[Path]:
    """Checkpoints, whole, damaged or half-written, and the head of earlier runs."""
    return sorted(path for pattern in ("step-*", "head", "head.*") for path in output.glob(pattern) if path.is_dir())


def _evaluation(
    model: SpeculativeModel, measured: AnswerSet, num_drafts: int, finished: Callable[[TrainedHead], Head]
) -> Callable[[TrainedHead], Mapping[str, float]]:
    """Acceptance of the finished head in a real engine on held-out prompts; `finished` makes it ready for that."""
    count = min(len(measured), _EVALUATED_PROMPTS)
    prompts = [measured.sequence(i)[: measured.answer_starts[i]].tolist() for i in range(count)]

    def evaluate(head: TrainedHead) -> Mapping[str, float]:
        trial = SpeculativeModel.from_pretrained(
            model.hf_model,
            draft=finished(head),
            num_speculative_tokens=num_drafts,
            tokenizer=model.tokenizer,
            max_model_len=model.config.max_model_len,
            backend=model.backend_name,
            generation_config=model.generation_config_use,
            cuda_graphs=False,
        )
        completions = trial.generate(prompts, SamplingParams(max_new_tokens=_EVALUATED_TOKENS))
        return {"tau": pool_requests([c.stats for c in completions]).tau}

    return evaluate
