"""A certificate: the checks of losslessness on this machine, each shown to see planted defects, in one document.

A defect is planted into what speculating requests ask of a loaded model, or into the noise, so that every check runs as
it does otherwise. The checksum is sha256 over all other fields in canonical form: a reader can make it again.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from evals.acceptance.acceptance import settings
from evals.acceptance.summary import Json
from evals.data.datasets import digest
from evals.lossless.greedy import FLOAT32_TOLERANCE
from evals.lossless.lossless import answers_to, distribution_of, identity, keyed_identity
from evals.lossless.verdicts import ALPHA, POWER
from evals.runs.conversations import Worker, prompt_of
from evals.runs.executor import Plan
from evals.runs.store import versions
from evals.runs.verdict import Verdict, together
from specdec.config import SAMPLING
from specdec.engine import admission
from specdec.interrupts import interrupts_as_they_are
from specdec.requests import noise
from specdec.requests.noise import gumbel
from specdec.requests.request import Completion
from specdec.requests.sampling import SamplingParams
from specdec.rounds import randomness
from specdec.rounds.randomness import noise_seeds, request_key

_REQUESTS = 64
_TOKENS = 16
_WINNERS = 1024
_MOST_REPEATED = 5
"""Equal values among the winners: one or two of noise that keeps its exponent, a hundred of noise of 24 bits."""
_CHECKS = ("greedy", "keyed", "sampled", "streams")
_ELSE = (
    "options of requests but max_new_tokens, temperature, top_k, top_p, min_p, seed, n, ignore_eos and logprobs; "
    "preemption, prefix caching, several ranks and threads"
)


def changed(generate: Any, change: Any) -> Any:
    """A `generate` whose speculating requests ask for something else, by their rows, or end in a rejected draft."""

    def wrong(prompts: Any, params: Any) -> Any:
        if isinstance(params, SamplingParams) or not params[0].num_speculative_tokens:
            return generate(prompts, params)
        if change is not None:
            return generate(prompts, [change(one, row) for row, one in enumerate(params)])
        done = generate(prompts, [replace(one, return_drafts=True) for one in params])
        return [replace(one, token_ids=_too_many(one), drafts=None) for one in done]

    return wrong


def _too_many(done: Completion) -> list[int]:
    """The tokens up to the first rejected draft, and that draft."""
    place = 1
    for record, drafts in zip(done.stats.rounds, done.drafts or (), strict=True):
        place += record.accepted
        if record.accepted < len(drafts):
            return [*done.token_ids[:place], drafts[record.accepted]]
        place += 1
    return done.token_ids


PLANTED: tuple[tuple[str, str, Any, str, Any], ...] = (
    ("greedy", "a draft too many is accepted", None, "", None),
    ("keyed", "noise of the row, not of the request", None, "", lambda one, row: replace(one, seed=row)),
    (
        "keyed",
        "log-probabilities after the temperature",
        None,
        "",
        lambda one, _: replace(one, logprobs_mode="processed"),
    ),
    ("sampled", "temperature 10 % too high", None, "", lambda one, _: replace(one, temperature=1.1 * one.temperature)),
    (
        "streams",
        "noise used again one position later",
        randomness,
        "noise_seeds",
        lambda keys, at: noise_seeds(keys, at // 2),
    ),
    ("streams", "sample index left out", admission, "request_key", lambda seed, _: request_key(seed, 0)),
    ("streams", "noise of 24 bits", noise, "gumbel", lambda *of: -(-torch.rand_like(gumbel(*of)).log()).log()),
)
"""Defects: the check that must see each, its name, and a function in place of a module's, or a change for `changed`."""


@interrupts_as_they_are()
def certified(worker: Worker, plan: Plan, samples: int, places: int) -> Json:
    """The checks of one loaded model, and which defects they see. For `samples` and `places` see `check`."""
    model = worker.models["main"]
    params = replace(plan.asking.params, logprobs=2)
    plan = replace(plan, asking=replace(plan.asking, params=params))
    names = _CHECKS if model.config.keyed else ("greedy", "sampled")
    found: Json = {name: _check(name, worker, plan, samples, places) for name in names}
    verdict = together(Verdict(part["verdict"]) for part in found.values())
    planted = []
    for name, defect, module, function, wrong in PLANTED:
        is_rounded = defect.startswith("log") and found["greedy"]["logprob_limit"] is None
        if name in names and found[name]["verdict"] is Verdict.PASS and not is_rounded:
            own = (model, "generate", changed(model.generate, wrong))
            with patch.object(*((module, function, wrong) if module else own)):
                seen = _check(name, worker, plan, samples, 1)["verdict"] is Verdict.FAIL
            planted.append({"check": name, "defect": defect, "found": seen})
    return {"settings": settings(plan, worker.facts()), **found, "planted": planted, "verdict": verdict}


def _check(name: str, worker: Worker, plan: Plan, samples: int, places: int) -> Json:
    if name == "streams":
        return noise_streams(worker, plan)
    if name == "sampled":
        return distribution_of(worker, plan, samples, places)
    found = keyed_identity(worker, plan) if name == "keyed" else identity(worker, plan, answers_to(worker, plan))
    model = worker.models["main"]
    limit = FLOAT32_TOLERANCE if model.hf_model.dtype == torch.float32 else None
    found["logprob_limit"] = limit = 0.0 if model.describe()["backend"] == "batch_invariant" else limit
    if limit is not None and any(arm["logprob_difference"] > limit for arm in found["arms"]):
        found["verdict"] = Verdict.FAIL
    return found


def noise_streams(worker: Worker, plan: Plan) -> Json:
    """Test that the streams of `sampling="keyed"` are independent, and the noise itself. Right ones fail with
    probability ALPHA.

    At a temperature where all tokens are equally probable the noise alone decides, so that two tokens are the same as
    often as there are tokens in the vocabulary. Noise that is used twice gives the same token twice: at neighbouring
    positions, in two samples of a seed, or in two requests.

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


def certificate(rules: Json, options: Json) -> Json:
    """The document. rules: what `certified` returned under each rule of sampling. options: of the command."""
    void = not all(planted["found"] for one in rules.values() for planted in one["planted"])
    verdict = Verdict.FAIL if void else together(one["verdict"] for one in rules.values())
    missing = [text for rule, one in rules.items() for text in _not_covered(f"sampling={rule}", one)]
    missing += [f"sampling={rule}" for rule in SAMPLING if rule not in rules]
    return sealed({"rules": rules, "void": void, "not_covered": [*missing, _ELSE], "verdict": verdict}, options)


def _not_covered(rule: str, found: Json) -> Iterator[str]:
    facts = found["settings"]["models"]["main"]
    if not facts["device"].startswith("cuda"):
        yield f"{rule}: kernels and graphs of a GPU; this ran on {facts['device']}"
    if found["greedy"]["logprob_limit"] is None:
        yield f"{rule}: equal log-probabilities; {facts['backend']} in {facts['dtype']} rounds by the batch's shape"
    for fit in found["sampled"]["arms"]:
        blind = [power["defect"] for power in fit["powers"] if power["everywhere"] < POWER]
        yield from (f"{rule}, {fit['arm']}: {defect}" for defect in blind)


def sealed(document: Json, options: Json) -> Json:
    """The document with the options of the command, the commit of this checkout, versions and its checksum."""
    # By a shell, as there may be no git; of this folder, as an environment may lie in another project's checkout.
    git = "git --git-dir=.git --work-tree=. describe --always --dirty --abbrev=40"
    root = Path(__file__).parents[2]
    commit = subprocess.run(git, shell=True, cwd=root, capture_output=True, text=True, check=False).stdout.strip()
    given = {name: str(value) for name, value in options.items()}
    whole = {"schema": "specdec.certificate", "schema_version": 1, "commit": commit, "versions": versions()}
    whole |= {"options": given, **document}
    return {**whole, "sha256": digest(whole)}
