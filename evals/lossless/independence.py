"""The noise of `sampling="keyed"`: its law, that its streams are independent, and how fine it is where tokens win.

Eight equally probable tokens are drawn in pairs: at neighbouring positions, of two samples, of two requests. All pairs
must be equally frequent, so that a wrong law is seen as well as noise that is used twice.
"""

from __future__ import annotations

import numpy as np
import torch

from evals.lossless.verdicts import ALPHA, POWER
from evals.runs.verdict import Verdict
from specdec.requests import noise
from specdec.rounds import randomness
from specdec.values import Json

_IDS, _REQUESTS, _POSITIONS, _WINNERS = 8, 16, 4096, 1024
_MOST_REPEATED = 5
"""Equal values among the winners: one or two of noise that keeps its exponent, a hundred of noise of 24 bits."""


def noise_streams() -> Json:
    """Test the library's noise: chi-square of each kind of pairs, right noise fails with probability ALPHA at most.

    least_share: pairs with the same noise, as a share of all, that would be found with probability POWER.
    """
    from scipy.special import chdtri, chndtrinc
    from scipy.stats import chisquare

    keys = [[randomness.request_key(seed, sample) for seed in range(_REQUESTS)] for sample in (0, 1)]
    seeds = randomness.noise_seeds(np.array(keys, np.uint64)[..., None], np.arange(_POSITIONS))
    drawn = noise.gumbel(torch.from_numpy(seeds)[..., None], torch.arange(_IDS)).argmax(-1).numpy()
    kinds = {
        "neighbouring positions": drawn[..., ::2] * _IDS + drawn[..., 1::2],
        "samples of one seed": drawn[0] * _IDS + drawn[1],
        "neighbouring seeds": drawn[:, ::2] * _IDS + drawn[:, 1::2],
    }
    p_values = {
        kind: float(chisquare(np.bincount(pairs.ravel(), minlength=_IDS**2)).pvalue) for kind, pairs in kinds.items()
    }
    level, degrees = ALPHA / len(kinds), _IDS**2 - 1
    # A share s of equal pairs adds s² (ids - 1) a pair to what chi-square is expected to be.
    lacking = chndtrinc(chdtri(degrees, level), degrees, 1 - POWER) / (_IDS - 1) / (_REQUESTS * _POSITIONS)
    best = noise.gumbel(torch.tensor([[5]]), torch.arange(2**22))[0].topk(_WINNERS).values
    repeated = _WINNERS - len(best.unique())
    is_wrong = repeated >= _MOST_REPEATED or min(p_values.values()) <= level
    verdict = Verdict.FAIL if is_wrong else Verdict.PASS
    return {"p_values": p_values, "least_share": float(lacking**0.5), "repeated": repeated, "verdict": verdict}
