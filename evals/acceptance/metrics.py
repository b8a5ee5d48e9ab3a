"""Every number of an acceptance run as data: its name, its definition in one sentence, and the sums it is a ratio of.

The table, the JSON document and the page print the definitions from here, so they cannot drift from what is computed.
All metrics are ratios of sums over questions; that makes resampling questions (`summary.py`) one matrix product.

Three means are called "mean acceptance length". Over rounds (`tau`): vLLM's 1 + accepted / drafts of its counters,
Spec-Bench's mean of all `accept_lengths`, SGLang's benchmarks, and what aiperf calls token-weighted. Over requests
(`tau_requests`): EAGLE's alpha_length.py, which takes the mean of a question's turns and then of questions, and divides
by rounds - 1; aiperf's "Acceptance Length"; the mean of a client that reads each request's own. Over tokens
(`tau_tokens`): requests weighted by their tokens, as of rates that are kept token by token.
Source: vllm-project/vllm vllm/v1/spec_decode/metrics.py (`SpecDecodingLogging.log`); hemingkx/Spec-Bench
evaluation/speed.py (`speed`); SafeAILab/EAGLE eagle/evaluation/alpha_length.py; sgl-project/sglang
benchmark/mtbench/bench_sglang_eagle.py; ai-dynamo/aiperf docs/metrics-reference.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attention.toml_tables import read_tables
from evals.runs.answers import Answer
from specdec.requests.stats import pool

Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Metric:
    """A ratio: value = offset + product of the sums in `over` / product of the sums in `under`.

    Attributes:
        key: name in the JSON document; label: name in tables; definition: one sentence, printed beside the value.
        timing: whether it depends on wall time; baseline: whether it needs that of the target alone.
        share: whether it lies between 0 and 1; round_length: between 1 and K + 1. digits: decimals shown.
    """

    key: str
    label: str
    definition: str
    over: Sequence[str]
    under: Sequence[str]
    offset: float = 0.0
    timing: bool = False
    baseline: bool = False
    digits: int = 3
    share: bool = False
    round_length: bool = False

    @property
    def names(self) -> frozenset[str]:
        """The columns that it reads."""
        return frozenset((*self.over, *self.under))

    def limits(self, k: float) -> tuple[float, float]:
        """Lowest and highest possible value with K = `k`."""
        if self.share:
            return 0.0, 1.0
        return (1.0, k + 1) if self.round_length else (-np.inf, np.inf)

    def of(self, sums: Mapping[str, np.ndarray | float]) -> np.ndarray:
        """The metric of summed columns, each of any one shape; NaN where a denominator is zero."""
        over = np.prod([np.asarray(sums[name]) for name in self.over], axis=0)
        under = np.prod([np.asarray(sums[name]) for name in self.under], axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(under == 0, np.nan, over / under)
        return np.asarray(self.offset + ratio)


_ENTRIES = read_tables("evals", "acceptance/metrics.toml")
METRICS: Mapping[str, Metric] = {key: Metric(key, **entry) for key, entry in _ENTRIES.items()}

_POSITIONS = {
    "conditional": (
        "P(draft j accepted | drafts 1..j-1 accepted and draft j existed): accepted at j / rounds that reached j.",
        "accepted_at_{}",
        "reached_{}",
    ),
    "unconditional": (
        "P(drafts 1..j all accepted | draft j existed): accepted at j / rounds that had a draft j.",
        "accepted_at_{}",
        "offered_{}",
    ),
    "per_position_vllm": (
        "vLLM's per-position acceptance rate: rounds that accepted drafts 1..j / all rounds that had drafts, also "
        "those that a limit left fewer than j, drafts after a stop included.",
        "raw_accepted_at_{}",
        "drafting_rounds",
    ),
}
DEFINITIONS = {
    **{key: metric.definition for key, metric in METRICS.items()},
    **{kind: definition for kind, (definition, _, _) in _POSITIONS.items()},
    "histogram": "Rounds by the number of accepted drafts that were kept.",
}
"""The sentence that defines each number of one configuration."""


def position_metrics(width: int) -> dict[str, list[Metric]]:
    """The kinds of acceptance of each of `width` draft positions."""
    return {
        kind: [
            Metric(f"{kind}_{j}", f"position {j}", definition, (over.format(j),), (under.format(j),), share=True)
            for j in range(1, width + 1)
        ]
        for kind, (definition, over, under) in _POSITIONS.items()
    }


def columns(answers: Sequence[Answer], k: int, baseline: Sequence[Answer] | None = None) -> dict[str, np.ndarray]:
    """The sums of each question, as named columns of shape [questions].

    Args:
        answers: of one configuration, without errors. k: its K.
        baseline: the target-alone answers to the same questions, in the same order.
    """
    rows = [question_sums(answer, k) for answer in answers]
    if baseline is not None:
        for row, base in zip(rows, baseline, strict=True):
            row.update({f"base_{name}": value for name, value in question_sums(base, 0).items()})
    names = rows[0] if rows else {}
    return {name: np.array([row[name] for row in rows], np.float64) for name in names}


def question_sums(answer: Answer, k: int) -> dict[str, float]:
    """Counts of rounds cut at a stop, and before that (raw); tokens of the answers as each tool counts them; times."""
    stats = pool(answer.rounds)
    rounds = answer.rounds
    turns = answer.turns
    requests = [own for turn in turns if (own := pool(turn.rounds)).rounds]
    raw_accepted = sum(r.accepted for r in rounds)
    wall = sum(turn.wall_s for turn in turns)
    sums: dict[str, float] = {
        "rounds": stats.rounds,
        "slots": stats.rounds * k,
        "emitted": stats.emitted,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "raw_drafted": sum(r.drafted for r in rounds),
        "raw_accepted": raw_accepted,
        "requests": len(requests),
        "request_taus": sum(own.tau for own in requests),
        "token_taus": sum(own.emitted * own.tau for own in requests),
        "untrimmed": raw_accepted + len(rounds),
        "drafting_rounds": sum(r.drafted > 0 for r in rounds),
        "rounds_less_one": len(rounds) - len(turns),
        "new_tokens": sum(len(turn.token_ids) for turn in turns),
        "later_tokens": sum(max(len(turn.token_ids) - 1, 0) for turn in turns),
        "text_tokens": sum(turn.text_tokens - 1 for turn in turns),
        "wall_s": wall,
        "decode_s": sum(turn.decode_s for turn in turns),
    }
    for rate, counter in (("rate", "new_tokens"), ("rate_untrimmed", "untrimmed"), ("rate_text", "text_tokens")):
        sums[rate] = sums[counter] / wall if wall else 0.0
    for j in range(k):
        for name in ("accepted_at", "reached", "offered"):
            counts = getattr(stats, name)
            sums[f"{name}_{j + 1}"] = counts[j] if j < len(counts) else 0
        sums[f"raw_accepted_at_{j + 1}"] = sum(r.accepted > j for r in rounds)
    return sums


def histogram(answers: Sequence[Answer], k: int) -> list[int]:
    """Rounds that accepted 0, 1, .. K drafts."""
    counts = [0] * (k + 1)
    for answer in answers:
        for record in answer.rounds:
            counts[record.trimmed.accepted] += 1
    return counts
