"""Every number of an acceptance run as data: its name, its definition in one sentence, and the sums it is a ratio of.

The table, the JSON document and the page print the definitions from here, so they cannot drift from what is computed.
All metrics are ratios of sums over questions; that makes resampling questions (`bootstrap.py`) one matrix product.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np

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
    over: tuple[str, ...]
    under: tuple[str, ...]
    offset: float = 0.0
    timing: bool = False
    baseline: bool = False
    digits: int = 3
    share: bool = False
    round_length: bool = False

    def limits(self, k: float) -> tuple[float, float]:
        """Lowest and highest possible value with K = `k`."""
        if self.share:
            return 0.0, 1.0
        return (1.0, k + 1) if self.round_length else (-np.inf, np.inf)

    def of(self, sums: Mapping[str, np.ndarray]) -> np.ndarray:
        """The metric of summed columns, each of any one shape; NaN where a denominator is zero."""
        over = np.prod([sums[name] for name in self.over], axis=0)
        under = np.prod([sums[name] for name in self.under], axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(under == 0, np.nan, over / under)
        return np.asarray(self.offset + ratio)


def _read(key: str, entry: dict[str, Any]) -> Metric:
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in entry.items()}
    return Metric(key, **values)


_ENTRIES = tomllib.loads(files("evals").joinpath("acceptance/metrics.toml").read_text("utf-8"))
METRICS: tuple[Metric, ...] = tuple(_read(key, entry) for key, entry in _ENTRIES.items())

CONDITIONAL = "P(draft j accepted | drafts 1..j-1 accepted and draft j existed): accepted at j / rounds that reached j."
UNCONDITIONAL = "P(drafts 1..j all accepted | draft j existed): accepted at j / rounds that had a draft j."
VLLM_POSITIONS = (
    "vLLM's per-position acceptance rate: rounds that accepted drafts 1..j / all rounds that had drafts, also those "
    "that a limit left fewer than j, drafts after a stop included."
)
HISTOGRAM = "Rounds by the number of accepted drafts that were kept."


def position_metrics(width: int) -> tuple[tuple[Metric, ...], tuple[Metric, ...], tuple[Metric, ...]]:
    """The conditional, the unconditional and vLLM's acceptance of each of `width` draft positions."""
    places = range(1, width + 1)
    conditional = [_at("conditional", CONDITIONAL, j, f"accepted_at_{j}", f"reached_{j}") for j in places]
    unconditional = [_at("unconditional", UNCONDITIONAL, j, f"accepted_at_{j}", f"offered_{j}") for j in places]
    vllm = [_at("per_position_vllm", VLLM_POSITIONS, j, f"raw_accepted_at_{j}", "drafting_rounds") for j in places]
    return tuple(conditional), tuple(unconditional), tuple(vllm)


def _at(key: str, definition: str, position: int, over: str, under: str) -> Metric:
    return Metric(f"{key}_{position}", f"position {position}", definition, (over,), (under,), share=True)


def columns(answers: Sequence[Answer], k: int, baseline: Sequence[Answer] | None = None) -> dict[str, np.ndarray]:
    """The sums of each question, as named columns of shape [questions].

    Args:
        answers: of one configuration, without errors. k: its K.
        baseline: the target-alone answers to the same questions, in the same order.
    """
    rows = [_question_sums(answer, k) for answer in answers]
    if baseline is not None:
        for row, base in zip(rows, baseline, strict=True):
            row.update({f"base_{name}": value for name, value in _question_sums(base, 0).items()})
    names = rows[0] if rows else {}
    return {name: np.array([row[name] for row in rows], np.float64) for name in names}


def _question_sums(answer: Answer, k: int) -> dict[str, float]:
    stats = pool(answer.rounds)
    sums: dict[str, float] = {
        "rounds": stats.rounds,
        "slots": stats.rounds * k,
        "emitted": stats.emitted,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        **_token_sums(answer),
        **_time_sums(answer),
    }
    for j in range(k):
        inside = j < len(stats.offered)
        sums[f"accepted_at_{j + 1}"] = stats.accepted_at[j] if inside else 0
        sums[f"reached_{j + 1}"] = stats.reached[j] if inside else 0
        sums[f"offered_{j + 1}"] = stats.offered[j] if inside else 0
        sums[f"raw_accepted_at_{j + 1}"] = sum(record.accepted > j for record in answer.rounds)
    return sums


def _token_sums(answer: Answer) -> dict[str, float]:
    """Counts before trimming (raw), and tokens of the answers as each tool counts them."""
    raw_accepted = sum(r.accepted for r in answer.rounds)
    return {
        "raw_drafted": sum(r.drafted for r in answer.rounds),
        "raw_accepted": raw_accepted,
        "untrimmed": raw_accepted + len(answer.rounds),
        "drafting_rounds": sum(r.drafted > 0 for r in answer.rounds),
        "rounds_less_one": len(answer.rounds) - len(answer.turns),
        "new_tokens": sum(len(turn.token_ids) for turn in answer.turns),
        "later_tokens": sum(max(len(turn.token_ids) - 1, 0) for turn in answer.turns),
        "text_tokens": sum(turn.text_tokens - 1 for turn in answer.turns),
    }


def _time_sums(answer: Answer) -> dict[str, float]:
    wall, tokens = sum(turn.wall_s for turn in answer.turns), _token_sums(answer)
    rates = {"rate": "new_tokens", "rate_untrimmed": "untrimmed", "rate_text": "text_tokens"}
    return {
        "wall_s": wall,
        "prefill_s": sum(turn.prefill_s for turn in answer.turns),
        "decode_s": sum(turn.decode_s for turn in answer.turns),
        **{rate: tokens[counter] / wall if wall else 0.0 for rate, counter in rates.items()},
    }


def histogram(answers: Sequence[Answer], k: int) -> list[int]:
    """Rounds that accepted 0, 1, .. K drafts."""
    counts = [0] * (k + 1)
    for answer in answers:
        for record in answer.rounds:
            counts[record.trimmed.accepted] += 1
    return counts
