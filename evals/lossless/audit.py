"""Another engine's answers against the target's own distribution, as `Replay` has it: one pass over each answer.

A greedy answer must be the target's most probable tokens but for near ties, which are named. Sampled answers are tested
together, by the likelihood ratios of named defects.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from evals.acceptance.summary import Json
from evals.data.datasets import digest, read_jsonl
from evals.errors import DataError
from evals.lossless.distribution import NodesAt
from evals.lossless.evidence import DEFECTS, Sampled, Sampling, measure
from evals.lossless.greedy import Replay, tolerance_of
from evals.lossless.verdicts import ALPHA, POWER, named
from evals.runs.conversations import Worker
from evals.runs.store import model_facts
from evals.runs.verdict import Verdict, together
from specdec.errors import InvalidInputError
from specdec.requests.sampling import SamplingParams
from specdec.values import only

_SAMPLING = ("top_k", "temperature", "top_p", "min_p")
_FIELDS = ("prompt", "tokens", *_SAMPLING, "seed", "id")


def audit(worker: Worker, path: Path) -> Json:
    """What a certificate says of a file of JSON lines: prompt (text or ids), tokens (the new ids) and parameters.

    Parameters of sampling are temperature (0: greedy), top_k, top_p and min_p, as `SamplingParams` has them.

    Raises:
        DataError: no prompt or no tokens in a line, another field, or a value that is not allowed.
    """
    model = worker.models["main"]
    replay = Replay.of(model)
    dtype = model.hf_model.dtype
    behind = []
    evidence = []
    greedy = 0
    for number, record in read_jsonl(path):
        place = f"{path.name}:{number}"
        prompt, tokens = _texts(place, record, model)
        try:
            params = SamplingParams(**only(record, _SAMPLING))
        except InvalidInputError as error:
            raise DataError(f"{place}: {error}") from None
        if params.greedy:
            greedy += 1
            logits = replay.all_logits([*prompt, *tokens])[len(prompt) - 1 : -1].double()
            best = logits.amax(-1)
            lacks = (best - logits.gather(1, torch.tensor([tokens]).T)[:, 0]).tolist()
            behind += [
                {"token": f"{place}, token {i}", "behind": lack, "allowed": lack < tolerance_of(dtype, float(best[i]))}
                for i, lack in enumerate(lacks)
                if lack
            ]
        else:
            own = Sampling(1, len(tokens), *(getattr(params, name) for name in _SAMPLING))
            text = np.array([[prompt[-1], *tokens]])
            nodes = NodesAt(replay, tuple(prompt[:-1]), own)
            evidence.append(measure(Sampled(text, 0 * text), nodes, dtype == torch.float32))
    verdicts = [Verdict.PASS if all(one["allowed"] for one in behind) else Verdict.FAIL] if greedy else []
    found = {"answers_sha256": digest(path.read_text()), "greedy": greedy, "sampled": len(evidence), "behind": behind}
    if evidence:
        p_named, powers = named(evidence)
        impossible = sum(one.impossible for one in evidence)
        chances = {defect.name: float(power) for defect, power in zip(DEFECTS, powers[0], strict=True)}
        found |= {"impossible": impossible, "p_named": p_named, "powers": chances, "power": POWER}
        blind = Verdict.PASS if powers[0].max() >= POWER else Verdict.NOT_TESTED
        verdicts.append(Verdict.FAIL if impossible or p_named <= ALPHA / 2 else blind)
    return {"audit": found, "model": model_facts(worker.facts()["main"]), "verdict": together(verdicts)}


def _texts(place: str, record: Any, model: Any) -> Any:
    """Prompt and new tokens as ids."""
    vocab = model.hf_model.config.get_text_config().vocab_size
    prompt = record.get("prompt")
    tokens = record.get("tokens")
    ids = model.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    given = all(isinstance(each, list) and each for each in (ids, tokens))
    if not given or set(record) - set(_FIELDS) or not all(type(i) is int and 0 <= i < vocab for i in [*ids, *tokens]):
        raise DataError(
            f"{place}: prompt (text or ids) and tokens (ids) are needed, ids below {vocab}; allowed are "
            f"{', '.join(_FIELDS)}"
        )
    return ids, tokens
