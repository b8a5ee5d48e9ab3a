"""Completions for TRL's GRPOTrainer, with the log-probabilities by which they were drawn; and the same ones, bit for
bit, for the trainer's loss.

Source: huggingface/trl, trl/trainer/grpo_trainer.py: `RolloutFunc`, prompts of this process, each as often as it is to
be answered -> prompt_ids, completion_ids, logprobs; `GRPOTrainer._get_per_token_logps_and_entropies`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec.errors import InvalidInputError

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


@dataclass(frozen=True)
class Invariant:
    """See `invariant`. model: the SpeculativeModel."""

    model: Any

    def log_probs(self, own: Tensor, input_ids: Tensor, attention_mask: Tensor, temperature: float) -> Tensor:
        """A rollout's log-probabilities (`logprobs_mode="processed"`) of each row's last tokens, with the trainer's
        gradient.

        Args:
            own: [B, C], the trainer's log-probabilities of the last C tokens, at this temperature.
            input_ids: [B, L], prompts and completions.
            attention_mask: [B, L], 0 for padding on either side.
            temperature: the rollout's.

        Returns:
            [B, C] float32; for padding and a row's first token, and without gradient, as in `own`.

        Raises:
            InvalidInputError: shapes that do not fit. Others: see `SpeculativeModel.score`.
        """
        real = attention_mask.bool()
        followed = (real & (real.cumsum(1) > 1))[:, -own.shape[1] :]
        if (real.shape, followed.shape) != (input_ids.shape, own.shape):
            raise InvalidInputError(
                "log_probs() got own, input_ids and attention_mask of shapes "
                f"{[list(each.shape) for each in (own, input_ids, attention_mask)]}: give [B, C], [B, L] and [B, L], C "
                "from 1 to L"
            )
        valued = own.float().clone()
        prompts = []
        completions = []
        for row, there, count in zip(input_ids, real, followed.sum(1).tolist(), strict=True):
            if count:
                ids = row[there].tolist()
                prompts.append(ids[:-count])
                completions.append(ids[-count:])
        scores = self.model.score(prompts, completions, temperature=temperature)
        values = valued.new_tensor([each.logprob for score in scores for each in score.logprobs])
        # Behind autograd's back: the gradient stays `own`'s, and `own + (values - own)` has other bits.
        valued.data.masked_scatter_(followed, values)
        return valued


def invariant(model: Any) -> Invariant:
    """Log-probabilities for a trainer that are the rollout's bits, so that no correction is due.

    Their values are computed by the batch-invariant rounds that made the rollout, their gradient is torch's own, of the
    trainer's forward: whatever that forward does (gradient checkpointing, packed rows) stays.

    Args:
        model: a SpeculativeModel with `backend="batch_invariant"` over the model that is trained.

    Raises:
        InvalidInputError: another backend.

    >>> invariant(model)
    Traceback (most recent call last):
    specdec.InvalidInputError: invariant() needs a model loaded with backend='batch_invariant', not 'torch'...
    """
    name = model.describe()["backend"]
    if name != "batch_invariant":
        raise InvalidInputError(
            f"invariant() needs a model loaded with backend='batch_invariant', not {name!r}, whose log-probabilities "
            "depend on the batch"
        )
    return Invariant(model)


def use_invariant(trainer: Any, model: Any) -> None:
    """From now on a GRPOTrainer's log-probabilities of the trained model are the rollout's; see `invariant`.

    Raises:
        InvalidInputError: the trainer has another model, for example a PeftModel around this one. See `invariant`.
    """
    policy, own, plain = invariant(model), trainer._get_per_token_logps_and_entropies, trainer.accelerator.unwrap_model
    if plain(trainer.model) is not model.hf_model:
        raise InvalidInputError(
            f"use_invariant() got a trainer of another model ({type(trainer.model).__name__}): give GRPOTrainer and "
            "SpeculativeModel.from_pretrained the same transformers model, without adapters of peft"
        )

    def log_probs(trained: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        found, *others = own(trained, input_ids, attention_mask, *args, **kwargs)
        if plain(trained) is model.hf_model:
            found = policy.log_probs(found, input_ids, attention_mask, trainer.temperature)
        return found, *others

    trainer._get_per_token_logps_and_entropies = log_probs
