"""The noise of `sampling="keyed"`: its law, that its streams are independent, and how fine it is where tokens win.

Tokens of one known distribution are drawn in pairs: at neighbouring positions, of two samples, of two requests. Counts
of a pair are compared with the product of the distribution, so that a wrong law is seen as well as noise that is used
twice.
"""

from __future__ import annotations

import numpy as np
import torch

from evals.lossless.verdicts import ALPHA, POWER
from evals.runs.verdict import Verdict
from specdec.requests import noise
from specdec.rounds import randomness
from specdec.values import Json

_REQUESTS, _POSITIONS, _WINNERS = 16, 4096, 1024
_PROBS = np.arange(1, 9) / 36
_MOST_REPEATED = 5
DEFINITION = (
    f"Counts of {_REQUESTS * _POSITIONS:,} pairs of draws against the product of their exact distributions, by "
    f"chi-square; right noise fails with probability {ALPHA:g} at most, over all kinds. least_share: pairs with the "
    f"same noise, as a share of all, that would be found with probability {POWER:g}. repeated: equal values among the "
    f"{_WINNERS} largest of 2^22 ids; {_MOST_REPEATED} are too many (noise of 24 bits has a hundred)."
)


def noise_streams() -> Json:
    """Test the library's noise."""
    from scipy.special import chdtri, chndtrinc
    from scipy.stats import chisquare

    keys = [[randomness.request_key(seed, sample) for seed in range(_REQUESTS)] for sample in (0, 1)]
    seeds = randomness.noise_seeds(np.array(keys, np.uint64)[..., None], np.arange(_POSITIONS))
    values = noise.gumbel(torch.from_numpy(seeds)[..., None], torch.arange(8))
    drawn = (torch.from_numpy(_PROBS).log() + values).argmax(-1).numpy()  # [2, requests, positions]
    pairs = {
        "neighbouring positions": 8 * drawn[..., ::2] + drawn[..., 1::2],
        "samples of one seed": 8 * drawn[0] + drawn[1],
        "neighbouring seeds": 8 * drawn[:, ::2] + drawn[:, 1::2],
    }
    count = _REQUESTS * _POSITIONS
    expected = count * np.outer(_PROBS, _PROBS).ravel()
    p_values = {
        name: float(chisquare(np.bincount(one.ravel(), minlength=64), expected).pvalue) for name, one in pairs.items()
    }
    level = ALPHA / len(pairs)
    # A share s of equal pairs adds 7 s² a pair to what chi-square, of 63 degrees of freedom, is expected to be.
    least = float(chndtrinc(chdtri(63, level), 63, 1 - POWER) / 7 / count) ** 0.5
    best = noise.gumbel(torch.tensor([[5]]), torch.arange(2**22))[0].topk(_WINNERS).values
    repeated = _WINNERS - len(best.unique())
    verdict = Verdict.FAIL if repeated >= _MOST_REPEATED or min(p_values.values()) <= level else Verdict.PASS
    found: Json = {"definition": DEFINITION, "p_values": p_values, "least_share": least, "repeated": repeated}
    return {**found, "verdict": verdict}
