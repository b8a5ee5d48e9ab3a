"""Another engine's answers against the target's own distribution, as `Replay` has it: one pass over each answer.

A greedy answer must be the target's most probable tokens but for near ties, which are named. Sampled answers are tested
together, by the likelihood ratios of named defects.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evals.acceptance.summary import Json
from evals.data.datasets import read_jsonl
from evals.errors import DataError
from evals.lossless.distribution import NodesAt
from evals.lossless.evidence import DEFECTS, Evidence, Sampled, Sampling, measure
from evals.lossless.greedy import Replay, tolerance_of
from evals.lossless.verdicts import ALPHA, POWER, named
from evals.runs.conversations import Worker
from evals.runs.store import model_facts
from evals.runs.verdict import Verdict, together
from specdec.requests.sampling import SamplingParams
from specdec.values import only, without

DEFINITION = (
    "Greedy answers: every token has the best logit of a replay in higher precision, or lies within the tolerance "
    "behind it. Sampled ones: no token is impossible, and no likelihood ratio of a named defect is large; right answers fail "
    f"with probability {ALPHA / 2:g} at most. NOT TESTED: no defect would have been found with probability {POWER:g}."
)
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_FIELDS = ("prompt", "tokens", *_SAMPLING, "seed", "id")


def audit(worker: Worker, path: Path) -> Json:
    """The document of a file of JSON lines: prompt (text or token ids), tokens (the new ids) and parameters.

    Parameters of sampling are temperature (0: greedy), top_k, top_p and min_p, as `SamplingParams` has them.

    Raises:
        DataError: no prompt or no tokens in a line, or another field. InvalidInputError: a value that is not allowed.
    """
    model = worker.models["main"]
    replay, dtype = Replay.of(model), model.hf_model.dtype
    behind: list[Json] = []
    evidence: list[Evidence] = []
    greedy = 0
    for number, record in read_jsonl(path):
        place = f"{path.name}:{number}"
        prompt, tokens = _texts(record, place, model.tokenizer)
        params = SamplingParams(**only(record, _SAMPLING))
        if not params.greedy:
            own = Sampling(1, len(tokens), params.top_k, params.temperature, params.top_p, params.min_p)
            text = np.array([[prompt[-1], *tokens]])
            nodes = NodesAt(replay, tuple(prompt[:-1]), own)
            evidence.append(measure(Sampled(text, np.zeros(text.shape, bool)), nodes, dtype == torch.float32))
            continue
        greedy += 1
        logits = replay.all_logits([*prompt, *tokens])[len(prompt) - 1 : -1].double()
        lacks = logits.amax(-1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        for i in lacks.nonzero()[:, 0].tolist():
            lack, limit = float(lacks[i]), tolerance_of(dtype, float(logits[i].max()))
            behind.append({"place": place, "token": i, "behind": lack, "allowed": lack < limit})
    parts: dict[str, Json] = {}
    if greedy:
        is_right = all(one["allowed"] for one in behind)
        parts["greedy"] = {"answers": greedy, "behind": behind, "verdict": Verdict.PASS if is_right else Verdict.FAIL}
    if evidence:
        parts["sampled"] = _sampled(evidence)
    facts, sha256 = model_facts(worker.facts()["main"]), hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "audit": {"definition": DEFINITION, "model": facts, "answers_sha256": sha256, **parts},
        "rules": {},
        "void": False,
        "not_covered": [name for name in ("greedy", "sampled") if name not in parts],
        "verdict": together(part["verdict"] for part in parts.values()),
    }


def _texts(record: Any, place: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    odd = list(without(record, _FIELDS))
    prompt, tokens = record.get("prompt"), record.get("tokens")
    if odd or not prompt or not tokens:
        raise DataError(f"{place}: give prompt and tokens; allowed are {', '.join(_FIELDS)}, not {odd}")
    return tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt, tokens


def _sampled(evidence: list[Evidence]) -> Json:
    """The test of all sampled answers, each of which is a place of its own."""
    p_named, powers = named(evidence)
    impossible = sum(one.impossible for one in evidence)
    verdict = Verdict.PASS if powers[0].max() >= POWER else Verdict.NOT_TESTED
    if impossible or p_named <= ALPHA / 2:
        verdict = Verdict.FAIL
    found = dict(zip((defect.name for defect in DEFECTS), powers[0].tolist(), strict=True))
    numbers = {"answers": len(evidence), "impossible": impossible, "p_named": p_named, "powers": found}
    return {**numbers, "verdict": verdict}
