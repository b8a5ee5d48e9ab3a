"""What benchmarks with random weights put in place of meaning: drawn acceptance, logits of a given entropy, no text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specdec.model import SpeculativeModel

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

    def before_read(self, verdict: Any, num_drafts: torch.Tensor) -> None:
        """Replace a verification result in place; for `HostReads.before_read`.

        Args:
            verdict: num_accepted [J] and tokens [J, n+1], valid up to num_accepted, are written; drafts: [J, n].
            num_drafts: [J], at most so many of a row are accepted. All int64 on one device.
        """
        count, tokens = len(verdict.num_accepted), verdict.tokens
        start = self._used if self._used + count <= _POOL else 0
        self._used = start + count
        torch.minimum(self._drawn[start : self._used], num_drafts, out=verdict.num_accepted)
        if verdict.drafts.shape[1]:
            tokens[:, :-1].copy_(verdict.drafts)
        tokens.scatter_(1, verdict.num_accepted[:, None], self._tokens[start : self._used, None])


def decide(model: SpeculativeModel, draws: DrawnAcceptance) -> None:
    """From now on the model's verification results are drawn; no request may run."""
    model.engine.executor.reads.before_read = draws.before_read


@torch.no_grad()
def follow(target: Any, seed: int = 0) -> list[int]:
    """From now on the model's next token depends on the last one alone: all tokens in one circle, which is returned.

    What attention and MLP add is zero, and the row of the output embeddings of the token to come is the input embedding
    of the last: all matmuls and kernels run as before, and greedy text is known beforehand. For Llama's layers.

    Raises:
        ValueError: input and output embeddings are one.
    """
    into, out = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    if into.data_ptr() == out.data_ptr():
        raise ValueError("the target's embeddings are tied: its output cannot be another order of its input")
    circle = torch.from_numpy(np.random.default_rng(seed).permutation(len(into))).to(into.device)
    torch.nn.init.normal_(into)
    out[circle.roll(-1)] = into[circle]
    for layer in target.get_decoder().layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return circle.tolist()


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
        flat = mean_entropy(logits * math.exp(middle)) > nats
        low, high = (middle, high) if flat else (low, middle)
    weight.mul_(math.exp(high))
    return math.exp(high)


def mean_entropy(logits: torch.Tensor) -> float:
    """[T, V] -> mean entropy of the rows in nats."""
    return float(torch.distributions.Categorical(logits=logits).entropy().mean())
