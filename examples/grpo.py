"""Reinforcement learning with TRL's GRPOTrainer, rollouts by speculative decoding: exactly the trained model's own.

    pip install "specdec-hf[rl]"
    python examples/grpo.py --way attached     # TRL calls the model's own generate_batch, which runs here
    python examples/grpo.py --way rollout      # TRL gets a rollout_func; log-probabilities come with the tokens
    python examples/grpo.py --way invariant    # and the trainer's log-probabilities are the rollout's, bit for bit
    python examples/grpo.py --way plain        # without specdec, to compare

The weights that are trained are those that generate: nothing is copied after a step. The reward is one that a tiny
model learns within minutes on a CPU, and it samples at a high temperature: at 1 it is sure of every token.
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import specdec
from specdec import SpeculativeModel
from specdec.extensions.rollouts.trl import rollout_func, use_invariant
from specdec.loading.names import builtin_path

MOST_NEW, TEMPERATURE = 24, 2.0
PROMPTS = [f"Question: Anna has {n} apples and buys {m} more. How many?\nAnswer:" for n in (3, 5, 8) for m in (2, 4)]


def reward(completions: list[str], **others: Any) -> list[float]:
    """The share of an answer's characters that are digits."""
    return [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in completions]


class Rewards(TrainerCallback):
    """Keeps what each step logs."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []
        self.differences: dict[str, list[float]] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **more: Any) -> None:
        self.lines.append(dict(logs or {}))


class Differences:
    """The largest difference between a rollout's log-probabilities and the trainer's, at each step."""

    def __init__(self, wrapped: SpeculativeModel) -> None:
        self.rollouts, self.told = rollout_func(wrapped), {}
        self.found: dict[str, list[float]] = {}

    def generate(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        found = self.rollouts(prompts, trainer)
        answers = zip(found["prompt_ids"], found["completion_ids"], found["logprobs"], strict=True)
        self.told = {(*prompt, *own): logprobs for prompt, own, logprobs in answers}
        return found

    def watch(self, trainer: Any, name: str) -> None:
        """Compare from now on what the trainer's method gives."""
        own, differences = trainer._get_per_token_logps_and_entropies, self.found.setdefault(name, [])

        def watched(model: Any, ids: torch.Tensor, mask: torch.Tensor, kept: int, *more: Any, **others: Any) -> Any:
            found = own(model, ids, mask, kept, *more, **others)
            largest = 0.0
            for row, values in enumerate(found[0]):
                told = self.told[tuple(ids[row][mask[row].bool()].tolist())]
                mine = values[mask[row, -kept:].bool()].detach().double()
                largest = max(largest, float((mine - torch.tensor(told, dtype=torch.float64)).abs().max()))
            differences.append(largest)
            return found

        trainer._get_per_token_logps_and_entropies = watched


def train(way: str, name: str, steps: int, seed: int, folder: str, **changes: Any) -> tuple[GRPOTrainer, Rewards]:
    """A trained trainer, and what its steps logged."""
    path, rewards = builtin_path(name), Rewards()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    settings = {
        "output_dir": folder,
        "per_device_train_batch_size": 12,
        "num_generations": 6,
        "max_completion_length": MOST_NEW,
        "temperature": TEMPERATURE,
        "max_steps": steps,
        "learning_rate": 2e-4,
        "logging_steps": 1,
        "seed": seed,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
        "use_transformers_continuous_batching": way == "attached",
    }
    options: dict[str, Any] = {"num_speculative_tokens": 4, "max_num_seqs": 16}
    differences = None
    with ExitStack() as stack:
        own: dict[str, Any] = {}
        if way == "attached":
            stack.enter_context(specdec.attach(model, "auto", seed=seed, **options))
        elif way == "rollout":
            wrapped = SpeculativeModel.from_pretrained(model, "auto", tokenizer=tokenizer, seed=seed, **options)
            own["rollout_func"] = rollout_func(stack.enter_context(wrapped))
        elif way == "invariant":
            options |= {"backend": "batch_invariant", "seed": seed}
            wrapped = SpeculativeModel.from_pretrained(model, "auto", tokenizer=tokenizer, **options)
            differences = Differences(stack.enter_context(wrapped))
            own["rollout_func"] = differences.generate
        trainer = GRPOTrainer(
            model,
            reward,
            args=GRPOConfig(**(settings | changes)),
            train_dataset=Dataset.from_dict({"prompt": PROMPTS * 20}),
            processing_class=tokenizer,
            callbacks=[rewards],
            **own,
        )
        if differences is not None:
            differences.watch(trainer, "without")
            use_invariant(trainer, wrapped)
            differences.watch(trainer, "with invariant")
            rewards.differences = differences.found
        trainer.train()
    return trainer, rewards


@click.command(help=__doc__)
@click.option(
    "--way", type=click.Choice(["attached", "rollout", "invariant", "plain"]), default="attached", show_default=True
)
@click.option("--model", "name", default="gsm-llama", show_default=True, help="gsm-llama (EAGLE-3), gsm-deepseek (MTP)")
@click.option("--steps", default=20, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), default="/tmp/specdec-grpo", show_default=True)
def main(way: str, name: str, steps: int, seed: int, folder: Path) -> None:
    """Train, and print the reward and the seconds of each step, and the seconds of all."""
    start = time.perf_counter()
    _, rewards = train(way, name, steps, seed, str(folder))
    found = [round(line["reward"], 3) for line in rewards.lines if "reward" in line]
    steps_took = [round(line["step_time"], 2) for line in rewards.lines if "step_time" in line]
    told = {"way": way, "rewards": found, "seconds": round(time.perf_counter() - start, 1), "of steps": steps_took}
    click.echo(json.dumps(told))
    for name, largest in rewards.differences.items():
        click.echo(f"largest difference of log-probabilities {name}: {largest}")


if __name__ == "__main__":
    main()
