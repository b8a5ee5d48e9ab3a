"""rollout_func: completions for TRL's GRPOTrainer, with the log-probabilities by which they were drawn.

Source: huggingface/trl, trl/trainer/grpo_trainer.py (`RolloutFunc`): prompts of this process, each as often as it is to
be answered -> prompt_ids, completion_ids, logprobs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rollouts = dict[str, list[Any]]


def rollout_func(model: Any, **options: Any) -> Callable[[list[Any], Any], Rollouts]:
    """A `rollout_func` for TRL's GRPOTrainer that generates with a `SpeculativeModel` over the model that is trained.

    Log-probabilities are of the distribution that each token was drawn from, after temperature and filters.

    Args:
        model: a SpeculativeModel over the model that is trained.
        options: options of `SpeculativeModel.generate`; they replace the trainer's arguments.

    Returns:
        A function of prompts (texts or chats) and the trainer, which gives "prompt_ids", "completion_ids" and
        "logprobs", a list for each prompt.
    """

    def rollouts(prompts: list[Any], trainer: Any) -> Rollouts:
        config = trainer.generation_config
        found = model.generate(list(prompts), config, logprobs=0, logprobs_mode="processed", **options)
        return {
            "prompt_ids": [completion.prompt_token_ids for completion in found],
            "completion_ids": [completion.token_ids for completion in found],
            "logprobs": [[each.logprob for each in completion.logprobs or ()] for completion in found],
        }

    return rollouts
