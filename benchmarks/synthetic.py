"""What benchmarks with random weights put in place of meaning: drawn acceptance, logits of a given entropy, no text.

Nothing here imports a module of specdec by name: `benchmarks.bench_serving --tree` uses it over other commits, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch

SAMPLED = {"temperature": 0.8, "top_p": 0.95}
"""SamplingParams of a sampled request."""
_STRATA = 32
_POOL = 1 << 16


def geometric(rate: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """[count] int64: how many drafts in a row are accepted when each is with probability `rate` given the one before.

    Every 32 values in a row hold one from each 32nd of the distribution, in any order: means of 300 rounds of one row
    scatter by 0.6 %, those of independent draws by 3 %.
    """
    if rate in (0, 1):
        return np.full(count, count if rate else 0)
    strata = rng.permuted(np.tile(np.arange(_STRATA), (-(-count // _STRATA), 1)), axis=1).reshape(-1)[:count]
    share = (strata + rng.random(count)) / _STRATA
    return np.floor(np.log1p(-share) / np.log(rate)).astype(np.int64)


class DrawnAcceptance:
    """Accepts each draft with probability `rate` given the one before, whatever the model said, on the device.

    It comes after the real acceptance and resampling kernels, whose work it leaves as it is, and writes over their
    result: three small kernels, no copy and no synchronisation. The token after the accepted ones is drawn from the
    vocabulary: random weights left to themselves soon repeat one token, and a mixture's routers would send all of them
    to the same few experts.
    """

    def __init__(self, rate: float, vocab: int, rng: np.random.Generator, device: torch.device) -> None:
        """Draw drafts accepted in a row, and tokens, beforehand; when they are used up they start over."""
        self._drawn = torch.from_numpy(geometric(rate, _POOL, rng)).to(device)
        self._tokens = torch.from_numpy(rng.integers(0, vocab, _POOL)).to(device)
        self._used = 0

    def overwrite(
        self, num_accepted: torch.Tensor, tokens: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor
    ) -> None:
        """Replace a verification result in place.

        Args:
            num_accepted: [J]; tokens: [J, n+1], valid up to num_accepted: both are written.
            drafts: [J, n]; num_drafts: [J], at most so many of a row are accepted. All int64 on one device.
        """
        count = len(num_accepted)
        start = self._used if self._used + count <= _POOL else 0
        self._used = start + count
        torch.minimum(self._drawn[start : self._used], num_drafts, out=num_accepted)
        if drafts.shape[1]:
            tokens[:, :-1].copy_(drafts)
        tokens.scatter_(1, num_accepted[:, None], self._tokens[start : self._used, None])

    def before_read(self, verdict: Any, num_drafts: torch.Tensor) -> None:
        """For `HostReads.before_read`."""
        self.overwrite(verdict.num_accepted, verdict.tokens, verdict.drafts, num_drafts)


def decide(model: Any, draws: DrawnAcceptance) -> None:
    """From now on the model's verification results are drawn; no request may run. Knows commit 11c2809, too."""
    reads: Any = getattr(model.executor, "reads", None)
    if hasattr(reads, "before_read"):
        reads.before_read = draws.before_read
    else:
        _decide_at_11c2809(draws)


def engine_of(model: Any) -> Any:
    """The model's engine, whose requests one thread submits and whose rounds it steps. Knows commit 11c2809, too."""
    return vars(model).get("engine") or vars(model)["_engine"]


def _decide_at_11c2809(draws: DrawnAcceptance) -> None:
    """As `decide`, for every model: that commit's reads have no seam, and are not told the numbers of drafts.

    In rounds from graphs these are copied from the host, while the device is busy with the verification.
    """
    executors, graphs = import_module("specdec.executor"), import_module("specdec.graphs")
    reads = import_module("specdec.readback").HostReads
    eagerly, from_graphs, start = executors.EagerExecutor.verify, graphs.GraphExecutor.verify, reads.start
    current: list[torch.Tensor] = []

    def verify_eagerly(executor: Any, round_: Any, draft: Any) -> Any:
        current[:] = [round_.num_drafts]
        return eagerly(executor, round_, draft)

    def verify_from_graphs(executor: Any, round_: Any, draft: Any) -> Any:
        if round_.rows is not None:
            own = torch.from_numpy(round_.target.num_drafts.astype(np.int64))
            current[:] = [own.pin_memory().to("cuda", non_blocking=True)]
        return from_graphs(executor, round_, draft)

    def start_read(self: Any, result: torch.Tensor) -> Any:
        width = result.shape[1] // 2
        draws.overwrite(result[:, 0], result[:, 1 : 1 + width], result[:, 1 + width :], current[0])
        return start(self, result)

    executors.EagerExecutor.verify, graphs.GraphExecutor.verify = verify_eagerly, verify_from_graphs
    reads.start = start_read


class Tokenizer:
    """Decodes to nothing: text is not part of the measurement."""

    def __call__(self, text: str, **options: Any) -> Any:
        """Prompts are token ids. Raises TypeError."""
        raise TypeError("prompts are token ids here")

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Any ids -> an empty string."""
        return ""


def sharpen(target: Any, head: Any, nats: float) -> None:
    """Scale the output embeddings so that the logits of random weights have so many nats of entropy on average.

    An MTP module shares the target's; an EAGLE-3 head has its own, which is scaled to the same entropy.

    Raises:
        ValueError: input and output embeddings are one: scaling them changes what the model reads.
    """
    weight = target.get_output_embeddings().weight
    if weight.data_ptr() == target.get_input_embeddings().weight.data_ptr():
        raise ValueError("the target's embeddings are tied: its logits cannot be scaled alone")
    scale_to_entropy(weight, nats)
    own = getattr(head, "lm_head", None)
    if own is not None:
        scale_to_entropy(own.weight, nats)


@torch.no_grad()
def scale_to_entropy(weight: torch.Tensor, nats: float, states: int = 16) -> float:
    """Scale an output embedding [V, H] in place until its logits have `nats` of entropy, and return the factor.

    The states before it are normalised, so vectors of unit RMS in random directions stand for them.
    """
    generator = torch.Generator(weight.device).manual_seed(97)  # not the seed of the weights
    hidden = torch.randn(states, weight.shape[1], device=weight.device, generator=generator)
    hidden = hidden / hidden.square().mean(1, keepdim=True).sqrt()
    logits = (hidden.to(weight.dtype) @ weight.T).float()
    low, high = math.log(1e-4), math.log(1e4)
    for _ in range(40):
        middle = (low + high) / 2
        if mean_entropy(logits * math.exp(middle)) > nats:
            low = middle
        else:
            high = middle
    weight.mul_(math.exp(high))
    return math.exp(high)


def mean_entropy(logits: torch.Tensor) -> float:
    """[T, V] -> mean entropy of the rows in nats."""
    return float(torch.distributions.Categorical(logits=logits).entropy().mean())
