"""Every number of an acceptance run as data: its name, its definition in one sentence, and the sums it is a ratio of.

The table, the JSON document and the page print the definitions from here, so they cannot drift from what is computed.
All metrics are ratios of sums over questions; that makes resampling questions (`bootstrap.py`) one matrix product.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from evals.runs.answers import Answer
from specdec.requests.stats import AcceptanceStats, pool

Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Metric:
    """value = offset + product of the sums in `over` / product of the sums in `under`.

    Attributes:
        key: name in the JSON document; label: name in tables; definition: one sentence, printed beside the value.
        timing: whether it depends on wall time; baseline: whether it needs that of the target alone.
        digits: decimals shown.
        share: whether it lies between 0 and 1; round_length: whether it lies between 1 and K + 1.
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
        """Between which values it lies with K = `k`."""
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


METRICS: tuple[Metric, ...] = (
    Metric(
        "tau",
        "τ",
        "Tokens kept per verification round: sum of tokens emitted / sum of rounds; the token of the prompt pass and "
        "tokens after a stop are not counted; 1.0 without speculation, at most K+1.",
        ("emitted",),
        ("rounds",),
        round_length=True,
    ),
    Metric(
        "tau_eagle",
        "τ EAGLE",
        "sum(new_tokens) / sum(idxs + 1) of EAGLE's answer files: accepted drafts + 1 per round, tokens after a stop "
        "in the last round included.",
        ("untrimmed",),
        ("rounds",),
        round_length=True,
    ),
    Metric(
        "tau_eagle_idxs",
        "τ EAGLE / idxs",
        "sum(new_tokens) / sum(idxs), as often quoted from EAGLE's answer files; idxs is rounds - 1 a turn, so this is "
        "too high by rounds / (rounds - turns).",
        ("untrimmed",),
        ("rounds_less_one",),
    ),
    Metric(
        "tau_spec_bench",
        "MAT (Spec-Bench)",
        "Spec-Bench's mean accepted tokens: mean of accept_lengths over all steps of all questions, tokens after a "
        "stop in the last step included.",
        ("untrimmed",),
        ("rounds",),
        round_length=True,
    ),
    Metric(
        "tau_vllm",
        "mean acceptance length (vLLM)",
        "vLLM's: 1 + accepted drafts / rounds that had drafts, drafts after a stop included.",
        ("raw_accepted",),
        ("drafting_rounds",),
        offset=1.0,
        round_length=True,
    ),
    Metric(
        "tau_sglang",
        "accept length (SGLang)",
        "SGLang's spec_accept_length, requests pooled: completion tokens / verification rounds, the token of the "
        "prompt pass counted, tokens after a stop not.",
        ("new_tokens",),
        ("rounds",),
    ),
    Metric(
        "acceptance_rate",
        "acceptance rate",
        "Accepted drafts / verified drafts; drafts that stand after a stop count in neither.",
        ("accepted",),
        ("drafted",),
        share=True,
    ),
    Metric(
        "acceptance_rate_vllm",
        "draft acceptance rate (vLLM)",
        "vLLM's: accepted drafts / verified drafts, drafts after a stop included.",
        ("raw_accepted",),
        ("raw_drafted",),
        share=True,
    ),
    Metric(
        "acceptance_rate_sglang",
        "accept rate (SGLang)",
        "SGLang's spec_accept_rate (EAGLE): accepted drafts / (rounds x K), drafts after a stop included, and K "
        "counted also where a length limit leaves fewer drafts.",
        ("raw_accepted",),
        ("slots",),
        share=True,
    ),
    Metric(
        "speedup",
        "speed-up",
        "Ratio of totals against the target alone in the same run: (new tokens / wall seconds) of this "
        "configuration / the same of the target alone; prompt passes included.",
        ("new_tokens", "base_wall_s"),
        ("wall_s", "base_new_tokens"),
        timing=True,
        baseline=True,
    ),
    Metric(
        "speedup_mean_of_rates",
        "speed-up, mean of rates",
        "mean over questions of (new tokens / wall seconds) / the same mean of the target alone; one token counter for "
        "both configurations.",
        ("rate",),
        ("base_rate",),
        timing=True,
        baseline=True,
    ),
    Metric(
        "speedup_spec_bench",
        "speed-up (Spec-Bench, EAGLE)",
        "As speed.py of Spec-Bench and EAGLE: mean over questions of (accepted + 1 summed / wall seconds) / mean of "
        "(answer text re-tokenised, less one a turn, / wall seconds) of the target alone; the two counters differ.",
        ("rate_untrimmed",),
        ("base_rate_text",),
        timing=True,
        baseline=True,
    ),
    Metric(
        "speedup_decode",
        "speed-up, decode only",
        "As speed-up, without the prompt pass: (tokens after the first / seconds from the first token to the last) of "
        "this configuration / the same of the target alone.",
        ("later_tokens", "base_decode_s"),
        ("decode_s", "base_later_tokens"),
        timing=True,
        baseline=True,
    ),
    Metric(
        "tokens_per_s",
        "tokens/s",
        "New tokens / wall seconds of the generate calls.",
        ("new_tokens",),
        ("wall_s",),
        timing=True,
        digits=1,
    ),
    Metric(
        "drafts_per_s",
        "drafts/s",
        "Verified drafts / wall seconds of the generate calls.",
        ("raw_drafted",),
        ("wall_s",),
        timing=True,
        digits=1,
    ),
)

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
    sums = {**_round_sums(stats, k), **_token_sums(answer), **_time_sums(answer)}
    for j in range(k):
        inside = j < len(stats.offered)
        sums[f"accepted_at_{j + 1}"] = stats.accepted_at[j] if inside else 0
        sums[f"reached_{j + 1}"] = stats.reached[j] if inside else 0
        sums[f"offered_{j + 1}"] = stats.offered[j] if inside else 0
        sums[f"raw_accepted_at_{j + 1}"] = sum(record.accepted > j for record in answer.rounds)
    return sums


def _round_sums(stats: AcceptanceStats, k: int) -> dict[str, float]:
    return {
        "rounds": stats.rounds,
        "slots": stats.rounds * k,
        "emitted": stats.emitted,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
    }


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
