"""A certificate: the checks of losslessness on this machine, each shown to see planted defects, in one document.

A defect is planted into what speculating requests ask of a loaded model, or into the noise, so that every check runs as
it does otherwise. The checksum is sha256 over all other fields in canonical form: a reader can make it again.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from evals.acceptance.acceptance import settings
from evals.acceptance.summary import Json
from evals.data.datasets import digest
from evals.lossless.greedy import FLOAT32_TOLERANCE
from evals.lossless.lossless import answers_to, distribution_of, identity, keyed_identity
from evals.lossless.independence import noise_streams
from evals.lossless.verdicts import POWER
from evals.runs.conversations import Worker
from evals.runs.executor import Plan
from evals.runs.verdict import Verdict, together
from specdec.interrupts import interrupts_as_they_are
from specdec.requests import noise
from specdec.requests.noise import gumbel
from specdec.requests.request import Completion
from specdec.requests.sampling import SamplingParams
from specdec.rounds import randomness
from specdec.rounds.randomness import noise_seeds, request_key

_EXERCISED = {"max_new_tokens", "temperature", "top_k", "top_p", "min_p", "ignore_eos", "seed", "n", "logprobs"}
Change = Callable[[SamplingParams, int], SamplingParams]
"""What a request of a call asks in place of what it should, by its place there."""


@dataclass(frozen=True)
class Changed:
    """A loaded model whose speculating requests ask for something else, or end in a draft that was rejected."""

    model: Any
    change: Change | None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def generate(self, prompts: Any, params: Any) -> Any:
        """As the model's."""
        if isinstance(params, SamplingParams) or not params[0].num_speculative_tokens:
            return self.model.generate(prompts, params)
        if self.change is not None:
            return self.model.generate(prompts, [self.change(one, row) for row, one in enumerate(params)])
        done = self.model.generate(prompts, [replace(one, return_drafts=True) for one in params])
        return [replace(one, token_ids=_too_many(one), drafts=None) for one in done]


def _too_many(done: Completion) -> list[int]:
    """The tokens up to the first rejected draft, and that draft."""
    place = 1
    for record, drafts in zip(done.stats.rounds, done.drafts or (), strict=True):
        if record.accepted < len(drafts):
            place += record.accepted
            return [*done.token_ids[:place], drafts[record.accepted]]
        place += record.emitted
    return done.token_ids


Plant = Callable[[Worker], AbstractContextManager[Any]]


def _model(change: Change | None) -> Plant:
    return lambda worker: patch.dict(worker.models, main=Changed(worker.models["main"], change))


def _noise(module: Any, name: str, wrong: Any) -> Plant:
    return lambda worker: patch.object(module, name, wrong)


PLANTED: Mapping[str, tuple[str, Plant]] = {
    "a draft too many is accepted": ("greedy", _model(None)),
    "noise of the row, not of the request": ("keyed", _model(lambda one, row: replace(one, seed=row))),
    "log-probabilities after the temperature": (
        "keyed",
        _model(lambda one, _: replace(one, logprobs_mode="processed")),
    ),
    "temperature 10 % too high": ("sampled", _model(lambda one, _: replace(one, temperature=1.1 * one.temperature))),
    "noise of the row, not of the position": (
        "streams",
        _noise(randomness, "noise_seeds", lambda keys, at: noise_seeds(keys, 0 * at)),
    ),
    "noise used again one position later": (
        "streams",
        _noise(randomness, "noise_seeds", lambda keys, at: noise_seeds(keys, at // 2)),
    ),
    "sample index left out": ("streams", _noise(randomness, "request_key", lambda seed, _: request_key(seed, 0))),
    "noise of 24 bits": ("streams", _noise(noise, "gumbel", lambda *of: -(-torch.rand_like(gumbel(*of)).log()).log())),
}
"""Defects, each with the check that must see it."""


@interrupts_as_they_are()
def certified(worker: Worker, plan: Plan, samples: int, places: int) -> Json:
    """The checks of one loaded model, and which defects they see. For `samples` and `places` see `check`."""
    params = replace(plan.asking.params, logprobs=2)
    plan = replace(plan, asking=replace(plan.asking, params=params))
    keyed = worker.models["main"].config.keyed
    names = ("greedy", "keyed", "sampled", "streams") if keyed else ("greedy", "sampled")
    found: Json = {name: _check(name, worker, plan, samples, places) for name in names}
    verdict = together(Verdict(part["verdict"]) for part in found.values())
    planted = []
    for defect, (name, plant) in PLANTED.items():
        if name in names and found[name]["verdict"] is Verdict.PASS:
            with plant(worker):
                seen = _check(name, worker, plan, samples, 1)["verdict"] is Verdict.FAIL
            planted.append({"check": name, "defect": defect, "found": seen})
    return {"settings": settings(plan, worker.facts()), **found, "planted": planted, "verdict": verdict}


def _check(name: str, worker: Worker, plan: Plan, samples: int, places: int) -> Json:
    if name == "streams":
        return noise_streams()
    if name == "sampled":
        return distribution_of(worker, plan, samples, places)
    found = keyed_identity(worker, plan) if name == "keyed" else identity(worker, plan, answers_to(worker, plan))
    model = worker.models["main"]
    limit = FLOAT32_TOLERANCE if model.hf_model.dtype == torch.float32 else None
    found["logprob_limit"] = limit = 0.0 if model.describe()["backend"] == "batch_invariant" else limit
    if limit is not None and any(arm["logprob_difference"] > limit for arm in found["arms"]):
        found["verdict"] = Verdict.FAIL
    return found


def certificate(rules: Mapping[str, Json], options: Mapping[str, Any]) -> Json:
    """The document. rules: what `certified` returned under each rule of sampling. options: of the command."""
    void = not all(planted["found"] for one in rules.values() for planted in one["planted"])
    verdict = Verdict.FAIL if void else together(one["verdict"] for one in rules.values())
    missing = [f"{rule}: {text}" for rule, one in rules.items() for text in _not_covered(one)]
    missing.append(
        f"options of requests: {', '.join(sorted({each.name for each in fields(SamplingParams)} - _EXERCISED))}"
    )
    return sealed({"rules": rules, "void": void, "not_covered": missing, "verdict": verdict}, options)


def _not_covered(found: Json) -> Iterator[str]:
    facts = found["settings"]["models"]["main"]
    if not facts["device"].startswith("cuda"):
        yield f"kernels and graphs of a GPU; this ran on {facts['device']}"
    if found["greedy"]["logprob_limit"] is None:
        yield f"equal log-probabilities; {facts['backend']} in {facts['dtype']} rounds by the batch's shape"
    yield from (
        name for name in ("greedy", "keyed", "sampled") if found.get(name, found)["verdict"] is Verdict.NOT_TESTED
    )
    for fit in found["sampled"]["arms"]:
        yield from (power["defect"] for power in fit["powers"] if power["everywhere"] < POWER)


def sealed(document: Json, options: Mapping[str, Any]) -> Json:
    """The document with the options of the command, the commit of this checkout, and its checksum."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or None
    given = {name: str(value) for name, value in options.items()}
    whole = {"schema": "specdec.certificate", "schema_version": 1, "commit": commit, "options": given, **document}
    return {**whole, "passed": document["verdict"] is Verdict.PASS, "sha256": digest(whole)}
