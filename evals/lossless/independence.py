"""The noise of `sampling="keyed"`: that its streams are independent, and how fine it is where tokens win.

At a temperature where all tokens are equally probable the noise alone decides, so that two tokens are the same as often
as there are tokens in the vocabulary. Noise that is used twice gives the same token twice: at neighbouring positions,
in two samples of a seed, or in two requests.
"""

from __future__ import annotations

import numpy as np
import torch

from evals.lossless.verdicts import ALPHA
from evals.runs.conversations import Worker, prompt_of
from evals.runs.executor import Plan
from evals.runs.verdict import Verdict
from specdec.requests import noise
from specdec.requests.sampling import SamplingParams
from specdec.values import Json

_REQUESTS = 64
_TOKENS = 16
_WINNERS = 1024
_MOST_REPEATED = 5
"""Equal values among the winners: one or two of noise that keeps its exponent, a hundred of noise of 24 bits."""


def noise_streams(worker: Worker, plan: Plan) -> Json:
    """Test the tokens of a keyed model with drafts, and the noise itself. Right ones fail with probability ALPHA.

    equal: of each kind of pairs how many are equal, how many pairs there are, and how many equal ones are allowed.
    """
    from scipy.stats import binom

    model = worker.models["main"]
    prompt = prompt_of(model.tokenizer, plan.data.questions[0], plan.asking)
    each = [
        SamplingParams(
            max_new_tokens=_TOKENS,
            temperature=1e6,  # all tokens are equally probable
            n=2,
            ignore_eos=True,
            seed=seed,
            num_speculative_tokens=plan.arms[-1].k,
        )
        for seed in range(_REQUESTS)
    ]
    done = model.generate([prompt] * _REQUESTS, each)
    drawn = np.reshape([one.token_ids for one in done], (_REQUESTS, 2, _TOKENS))
    kinds = {
        "neighbouring positions": drawn[..., 1:] == drawn[..., :-1],
        "samples of one seed": drawn[:, 0] == drawn[:, 1],
        "neighbouring seeds": drawn[1:] == drawn[:-1],
    }
    chance = 1 / model.hf_model.config.get_text_config().vocab_size
    equal = {
        kind: (int(found.sum()), found.size, int(binom.isf(ALPHA / len(kinds), found.size, chance)))
        for kind, found in kinds.items()
    }
    best = noise.gumbel(torch.tensor([[5]]), torch.arange(2**22))[0].topk(_WINNERS).values
    repeated = _WINNERS - len(best.unique())
    is_wrong = repeated >= _MOST_REPEATED or any(count > most for count, _, most in equal.values())
    return {"equal": equal, "repeated": repeated, "verdict": Verdict.FAIL if is_wrong else Verdict.PASS}
