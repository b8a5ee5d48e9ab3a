"""The noise of `sampling="keyed"`: its law, that its streams are independent, and how fine it is where tokens win.

Tokens of one known distribution are drawn in pairs: at neighbouring positions, of two samples, of two requests. Counts
of a pair are compared with the product of the distribution, so that a wrong law is seen as well as noise that is used
twice.
"""

from __future__ import annotations

import numpy as np
import torch

from evals.lossless.evidence import chi_square
from evals.lossless.verdicts import ALPHA, POWER
from evals.runs.verdict import Verdict
from specdec.requests import noise
from specdec.rounds import randomness
from specdec.values import Json

_REQUESTS, _POSITIONS, _WINNERS = 16, 4096, 1024
_PROBS = np.arange(1, 9) / 36
_PAIRS = 3
_MOST_REPEATED = 5
DEFINITION = (
    "Counts of pairs of draws against the product of their exact distributions, by chi-square; right noise fails with "
    f"probability {ALPHA:g} at most, over all pairs. least_share: pairs with the same noise, as a share of all, that "
    f"would be found with probability {POWER:g}. repeated: equal values among the {_WINNERS} largest of 2^22 ids; "
    f"{_MOST_REPEATED} are too many (noise of 24 bits has a hundred)."
)


def noise_streams() -> Json:
    """Test the library's noise."""
    keys = [[randomness.request_key(seed, sample) for seed in range(_REQUESTS)] for sample in (0, 1)]
    seeds = randomness.noise_seeds(np.array(keys, np.uint64)[..., None], np.arange(_POSITIONS))
    values = noise.gumbel(torch.from_numpy(seeds)[..., None], torch.arange(len(_PROBS)))
    drawn = (torch.from_numpy(_PROBS).log() + values).argmax(-1).numpy()  # [2, requests, positions]
    tests = [
        _joint("neighbouring positions", drawn[..., ::2], drawn[..., 1::2]),
        _joint("samples of one seed", drawn[0], drawn[1]),
        _joint("neighbouring seeds", drawn[:, ::2], drawn[:, 1::2]),
    ]
    best = noise.gumbel(torch.tensor([[5]]), torch.arange(2**22))[0].topk(_WINNERS).values
    repeated = _WINNERS - len(best.unique())
    is_wrong = repeated >= _MOST_REPEATED or min(test["p_value"] for test in tests) <= ALPHA / _PAIRS
    verdict = Verdict.FAIL if is_wrong else Verdict.PASS
    return {"definition": DEFINITION, "tests": tests, "repeated": repeated, "verdict": verdict}


def _joint(pair: str, first: np.ndarray, second: np.ndarray) -> Json:
    from scipy.special import chdtrc, chdtri, chndtrinc

    size, count = len(_PROBS), first.size
    counts = np.bincount(first.ravel() * size + second.ravel(), minlength=size * size)
    statistic, degrees = chi_square(counts, count * np.outer(_PROBS, _PROBS).ravel())
    # A share s of equal pairs adds s² (size - 1) for each pair to what chi-square is expected to be.
    lacking = chndtrinc(chdtri(degrees, ALPHA / _PAIRS), degrees, 1 - POWER) / (size - 1) / count
    return {"pair": pair, "count": count, "p_value": chdtrc(degrees, statistic), "least_share": lacking**0.5}
