"""Fresh heads to train."""

from __future__ import annotations

import torch

from drafters.eagle3.checkpoint import TargetFacts
from drafters.eagle3.head import Eagle3Head
from drafters.eagle3.spec import Eagle3Spec
from drafters.vocab import most_frequent


def fresh_eagle3(spec: Eagle3Spec, target: TargetFacts, counts: torch.Tensor, seed: int) -> Eagle3Head:
    """A head with random float32 weights on the target's device; its lm_head starts as the target's rows.

    Args:
        spec: the head to make.
        target: shares its embedding (and lm_head when the spec says so).
        counts: [V] how often the target wrote each token; the draft vocabulary is the most frequent Vd of them.
        seed: of the weights.

    Raises:
        HeadMismatchError, InvalidInputError: spec and target do not fit.
    """
    d2t = most_frequent(counts, spec.draft_vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shared = (target.embedding[: spec.vocab_size], target.lm_head[: spec.draft_vocab_size])
        head = Eagle3Head(spec, *shared, d2t, torch.device("cpu"))
    head.to(target.embedding.device)
    if spec.own_lm_head and spec.hidden_size == target.hidden_size:
        with torch.no_grad():
            head.lm_head.weight.copy_(target.lm_head[head.target_ids])
    return head
