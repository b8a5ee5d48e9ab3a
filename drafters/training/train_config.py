"""TrainConfig: all settings of a training run, except its data."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from attention.errors import InvalidInputError


@dataclass(frozen=True)
class TrainConfig:
    """One run. Two runs with equal configuration, data and device kind give the same head.

    Attributes:
        steps: optimizer steps; the learning rate's cosine ends here. batch_size: sequences per step.
        ttt_steps, decay: steps of the training-time test, and the loss weight decay^i of step i.
        learning_rate, warmup_steps, weight_decay, beta2, clip: AdamW (beta1 0.9), linear warm-up, gradient norm.
        seed: seed of the batches, which are padded to a multiple of `pad_multiple` tokens (few shapes for a compiler).
        log_every: steps between two readings of the loss (each waits for the device).
        held_out_every: steps between two measurements of held-out acceptance.
        checkpoint_every, keep_checkpoints: steps between two checkpoints, and how many stay.
        bfloat16: autocast to bfloat16 on CUDA (never on CPU). compile: run the loss through torch.compile.
    """

    steps: int = 1500
    batch_size: int = 48
    ttt_steps: int = 5
    decay: float = 0.8
    learning_rate: float = 1e-3
    warmup_steps: int = 50
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

    def __post_init__(self) -> None:
        """Raises InvalidInputError for values that no run can use."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or field.name in ("seed", "warmup_steps", "weight_decay"):
                continue
            if not 0 < value < math.inf:
                raise InvalidInputError(f"{field.name} must be positive and finite, not {value}")
        if self.seed < 0:
            raise InvalidInputError(f"seed must not be negative; given is {self.seed}")
        if self.warmup_steps < 0 or self.weight_decay < 0 or not 0 < self.decay <= 1 or not 0 < self.beta2 < 1:
            raise InvalidInputError(
                f"allowed are warmup_steps >= 0, weight_decay >= 0, 0 < decay <= 1 and 0 < beta2 < 1; given are "
                f"{self.warmup_steps}, {self.weight_decay}, {self.decay} and {self.beta2}"
            )
