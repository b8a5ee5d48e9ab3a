"""TRL's GRPOTrainer with rollouts of ours: log-probabilities are those of the trainer's forward at every step, rewards
are those of training without speculation, and replayed completions give the same losses.

    PYTHONPATH=tests:examples python -m tests.public.soak_grpo [--model gsm-llama] [--steps 20] [--out FILE]

Ends in one JSON line. Exits with 1 if log-probabilities differ by more than 1e-3, a planted stale cache is not seen, a
loss differs, or a reward is outside the interval of the seeds without speculation.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import grpo
import numpy as np
import torch
from scipy import stats
from transformers.utils import logging

from specdec.engine.engine import Engine

MOST_DIFFERENCE, SEEDS, OURS = 1e-3, 5, 3
Function = Callable[[list[Any], Any], dict[str, list[Any]]]


@torch.no_grad()
def forward_logprobs(model: Any, prompt: list[int], completion: list[int], temperature: float) -> np.ndarray:
    """[n] of the completion's tokens by a plain forward of the model as it is now, in evaluation mode."""
    mode = model.training
    model.eval()
    ids = torch.tensor([prompt + completion], device=model.device)
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    model.train(mode)
    found: np.ndarray = logits.log_softmax(1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()
    return found


class Checked:
    """A `rollout_func` whose log-probabilities are compared with the trainer's model at each call, and kept.

    Attributes:
        differences: the largest of each call. kept: what it returned.
    """

    def __init__(self, function: Function) -> None:
        self.function, self.differences, self.kept = function, list[float](), list[dict[str, list[Any]]]()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        found = self.function(prompts, trainer)
        each = zip(found["prompt_ids"], found["completion_ids"], found["logprobs"], strict=True)
        temperature = trainer.args.temperature
        own = [np.abs(forward_logprobs(trainer.model, p, c, temperature) - own).max() for p, c, own in each]
        self.differences.append(float(max(own)))
        self.kept.append(found)
        return found


def losses(rewards: Any) -> list[float]:
    return [line["loss"] for line in rewards.lines if "loss" in line]


def mean_reward(rewards: Any) -> float:
    return float(np.mean([line["reward"] for line in rewards.lines if "reward" in line]))


def trained(way: str, name: str, steps: int, seed: int, wrap: Callable[[Function], Function] | None = None) -> Any:
    """The logged steps, and seconds."""
    start, plain = time.perf_counter(), grpo.rollout_func
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(grpo, "rollout_func", lambda model: plain(model) if wrap is None else wrap(plain(model))),
    ):
        _, rewards = grpo.train(way, name, steps, seed, folder)
    return rewards, time.perf_counter() - start


def replayed(kept: list[dict[str, list[Any]]]) -> Callable[[Function], Function]:
    left = iter(kept)
    return lambda function: lambda prompts, trainer: next(left)


@click.command(help=__doc__)
@click.option("--model", "name", default="gsm-llama", show_default=True)
@click.option("--steps", default=20, show_default=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(name: str, steps: int, out: Path | None) -> None:
    """Run all, and print a line."""
    logging.set_verbosity_error()
    checks: list[Checked] = []

    def checked(function: Function) -> Function:
        checks.append(Checked(function))
        return checks[-1]

    rewards, _ = trained("rollout", name, steps, 0, checked)
    again, _ = trained("rollout", name, steps, 0, replayed(checks[0].kept))
    nothing = lambda self: None  # noqa: E731
    with patch.object(Engine, "check_weights", nothing), patch.object(Engine, "forget_prefixes", nothing):
        trained("rollout", name, 3, 0, checked)
    plain = [trained("plain", name, steps, seed) for seed in range(SEEDS)]
    ours = [trained(way, name, steps, 10 + i) for i, way in enumerate(["rollout", "attached", "rollout"][:OURS])]
    means = np.array([mean_reward(each) for each, _ in plain])
    half = float(stats.t.ppf(0.975, SEEDS - 1) * means.std(ddof=1) * np.sqrt(1 + 1 / SEEDS))
    result = {
        "benchmark": "soak_grpo",
        "model": name,
        "steps": steps,
        "tokens": sum(len(ids) for found in checks[0].kept for ids in found["completion_ids"]),
        "largest_difference": max(checks[0].differences),
        "largest_difference_of_a_stale_cache": max(checks[1].differences),
        "losses_equal": losses(rewards) == losses(again),
        "first_reward": rewards.lines[0]["reward"],
        "rewards_without": means.tolist(),
        "interval": [float(means.mean()) - half, float(means.mean()) + half],
        "rewards_with": [mean_reward(each) for each, _ in ours],
        "seconds_without": float(np.median([seconds for _, seconds in plain])),
        "seconds_with": float(np.median([seconds for _, seconds in ours])),
    }
    low, high = result["interval"]  # type: ignore[misc]
    right = result["largest_difference"] < MOST_DIFFERENCE < result["largest_difference_of_a_stale_cache"]  # type: ignore[operator]
    right = right and result["losses_equal"] and all(low < own < high for own in result["rewards_with"])  # type: ignore[attr-defined]
    click.echo(json.dumps(result | {"right": bool(right)}))
    if out is not None:
        out.write_text(json.dumps(result | {"right": bool(right)}) + "\n")
    sys.exit(not right)


if __name__ == "__main__":
    main()
