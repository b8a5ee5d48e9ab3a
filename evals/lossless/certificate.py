"""A certificate: the checks of losslessness on this machine, each shown to see planted defects, in one document.

A defect is planted into what speculating requests ask of a loaded model or return, so that every check runs as it does
otherwise. The checksum is sha256 over all other fields in canonical form: whoever reads the document can make it again.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from torch import Tensor

from evals.acceptance.acceptance import settings
from evals.acceptance.summary import Json
from evals.data.datasets import digest
from evals.lossless.greedy import FLOAT32_TOLERANCE
from evals.lossless.lossless import answers_to, distribution_of, identity, keyed_identity, print_check
from evals.lossless.streams import noise_streams
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

_EXERCISED = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "ignore_eos", "seed", "n", "logprobs")
Change = Callable[[SamplingParams, int], SamplingParams]
"""A request of a call, by its place there, as it is asked in place of what it should be."""


@dataclass(frozen=True)
class Planted:
    """A loaded model whose speculating requests have a defect: in what they ask, or in their last token."""

    model: Any
    change: Change | None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def generate(self, prompts: Sequence[Any], params: Any) -> list[Completion]:
        """As the model's. Without a change of what is asked, an answer ends in its first rejected draft."""
        if isinstance(params, SamplingParams) or not params[0].num_speculative_tokens:
            return self.model.generate(prompts, params)
        if self.change is not None:
            return self.model.generate(prompts, [self.change(one, row) for row, one in enumerate(params)])
        done = self.model.generate(prompts, [replace(one, return_drafts=True) for one in params])
        return [replace(one, token_ids=[*_with_a_draft_too_many(one)], drafts=None) for one in done]


def _with_a_draft_too_many(completion: Completion) -> Iterator[int]:
    ids = iter(completion.token_ids)
    yield next(ids)
    for record, drafts in zip(completion.stats.rounds, completion.drafts or (), strict=True):
        yield from (next(ids) for _ in range(record.accepted))
        if record.accepted < len(drafts):
            yield drafts[record.accepted]
            return
        yield next(ids)


def _coarse(seeds: Tensor, ids: Tensor) -> Tensor:
    w = -torch.expm1(-(-gumbel(seeds, ids)).exp())
    return -(-torch.log1p(-(w * 2**24).ceil() / (2**24 + 1))).log()


PLANTED: tuple[tuple[str, str, Change | None], ...] = (
    ("greedy", "a draft too many is accepted", None),
    ("keyed", "noise of the row in place of the request's", lambda one, row: replace(one, seed=row)),
    ("keyed", "log-probabilities after the temperature", lambda one, _: replace(one, logprobs_mode="processed")),
    ("sampled", "temperature 10 % too high", lambda one, _: replace(one, temperature=1.1 * one.temperature)),
)
"""Defects of speculation, each with the check that must see it."""
PLANTED_NOISE: dict[str, tuple[Any, str, Any]] = {
    "noise of the row in place of the position's": (
        randomness,
        "noise_seeds",
        lambda keys, at: noise_seeds(keys, 0 * at),
    ),
    "noise used again one position later": (randomness, "noise_seeds", lambda keys, at: noise_seeds(keys, at // 2)),
    "sample index left out": (randomness, "request_key", lambda seed, _: request_key(seed, 0)),
    "noise of 24 bits": (noise, "gumbel", _coarse),
}
"""Defects of the noise: a module, and a function in place of its own."""


@interrupts_as_they_are()
def certified(worker: Worker, plan: Plan, samples: int, places: int) -> Json:
    """The checks of one loaded model, and whether they see the defects. For `samples` and `places` see `check`."""
    model = worker.models["main"]
    params = replace(plan.asking.params, logprobs=2)
    plan = replace(plan, asking=replace(plan.asking, params=params))
    names = ("greedy", "keyed", "sampled") if model.config.keyed else ("greedy", "sampled")
    checks = {name: _check(name, worker, plan, samples, places) for name in names}
    found = []
    for name, defect, change in PLANTED:
        if name in names and checks[name]["verdict"] is Verdict.PASS:
            wrong = Worker({})
            wrong.models["main"] = Planted(model, change)
            found.append((name, defect, _check(name, wrong, plan, samples, 1)))
    if model.config.keyed:
        checks["streams"] = noise_streams()
        for defect, place in PLANTED_NOISE.items():
            with patch.object(*place):
                found.append(("streams", defect, noise_streams()))
    return {
        "settings": settings(plan, worker.facts()),
        **checks,
        "planted": [
            {"check": name, "defect": defect, "found": part["verdict"] is Verdict.FAIL} for name, defect, part in found
        ],
        "verdict": together(Verdict(part["verdict"]) for part in checks.values()),
    }


def _check(name: str, worker: Worker, plan: Plan, samples: int, places: int) -> Json:
    if name == "sampled":
        return distribution_of(worker, plan, samples, places)
    found = keyed_identity(worker, plan) if name == "keyed" else identity(worker, plan, answers_to(worker, plan))
    found["logprob_limit"] = limit = _logprob_limit(worker.models["main"])
    if limit is not None and any(arm["logprob_difference"] > limit for arm in found["arms"]):
        found["verdict"] = Verdict.FAIL
    return found


def _logprob_limit(model: Any) -> float | None:
    """Most that log-probabilities may differ by; None where the backend rounds by the batch's shape."""
    if model.describe()["backend"] == "batch_invariant":
        return 0.0
    return FLOAT32_TOLERANCE if model.hf_model.dtype == torch.float32 else None


def certificate(rules: Mapping[str, Json], options: Mapping[str, Any]) -> Json:
    """The document. rules: what `certified` returned under each rule of sampling. options: of the command."""
    void = not all(planted["found"] for one in rules.values() for planted in one["planted"])
    verdict = Verdict.FAIL if void else together(one["verdict"] for one in rules.values())
    missing = [text for rule, one in rules.items() for text in _not_covered(rule, one)]
    return sealed({"schema": "specdec.certificate", "rules": rules, "void": void, "verdict": verdict}, options, missing)


def sealed(document: Json, options: Mapping[str, Any], missing: Sequence[str]) -> Json:
    """The document with its commit, options and checksum. missing: what was not covered."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    whole = {
        **document,
        "schema_version": 1,
        "commit": commit or None,
        "options": {name: str(value) for name, value in options.items()},
        "not_covered": list(missing),
        "passed": document["verdict"] is Verdict.PASS,
    }
    return {**whole, "sha256": digest(whole)}


def _not_covered(rule: str, found: Json) -> Iterator[str]:
    """What the checks under one rule could not see, by name."""
    facts = found["settings"]["models"]["main"]
    if not facts["device"].startswith("cuda"):
        yield f"{rule}: a GPU with its kernels and graphs (this ran on {facts['device']})"
    for name in ("greedy", "keyed", "sampled"):
        part = found.get(name, {})
        if part.get("verdict") is Verdict.NOT_TESTED:
            yield f"{rule}: {name}"
        if part.get("logprob_limit", 0) is None:
            yield f"{rule}, {name}: log-probabilities ({facts['backend']} in {facts['dtype']} rounds by the batch)"
    for fit in found["sampled"]["arms"]:
        blind = [power["defect"] for power in fit["powers"] if power["everywhere"] < POWER]
        yield from (f"{rule}, {fit['arm']}: {defect}" for defect in blind)
    others = sorted({each.name for each in fields(SamplingParams)} - {*_EXERCISED})
    yield f"{rule}: options of requests: {', '.join(others)}"


def print_certificate(console: Console, document: Json) -> None:
    """Print the checks of each rule, the planted defects, what was not covered, and the verdict."""
    for rule, one in document["rules"].items():
        console.print(f"\nsampling={rule}", style="bold")
        print_check(console, one)
        for test in one.get("streams", {"tests": []})["tests"]:
            console.print(
                f"streams, {test['pair']}: p = {test['p_value']:.3g}; {test['least_share']:.1%} would be found"
            )
        for planted in one["planted"]:
            console.print(f"{'found' if planted['found'] else 'MISSED'}, by {planted['check']}: {planted['defect']}")
    for text in document["not_covered"]:
        console.print(f"not covered: {text}", style="yellow")
    void = ": a planted defect was missed, so that it says nothing" if document["void"] else ""
    console.print(f"certificate: {document['verdict']}{void}; sha256 {document['sha256']}", style="bold")
