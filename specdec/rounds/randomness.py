"""The uniforms and sampling parameters of a round's decided rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdec.requests.sampling import SamplingArrays
from specdec.rounds.rows import RowTable
from specdec.rounds.schedule import Schedule
from specdec.rounds.uniforms import Role, uniforms
from specdec.rounds.verification import TargetArrays


@dataclass(frozen=True)
class SamplingRound:
    """Host arrays of a round with sampled rows.

    Attributes:
        arrays: sampling parameters [J].
        draft_uniform: [R, n] float32, of drafts; accept_uniform: [J, n], of acceptance; next_uniform: [J, n+1], of
            the token after the accepted drafts, one for every place where it may stand.
    """

    arrays: SamplingArrays
    draft_uniform: np.ndarray
    accept_uniform: np.ndarray
    next_uniform: np.ndarray


def sampling_round(target: TargetArrays, schedule: Schedule, table: RowTable) -> SamplingRound | None:
    """Parameters and uniforms of the decided rows; None when all of them are greedy.

    The token that draft j+1 proposes stands j+1 after the bonus token; so does the next token when j drafts were
    accepted.
    """
    rows = schedule.rows[target.decided]
    arrays = table.sampling(rows)
    if not arrays.any_sampled:
        return None
    keys = table.key[rows][:, None]
    positions = table.length[rows][:, None] + np.arange(target.max_drafts + 1)
    return SamplingRound(
        arrays=arrays,
        draft_uniform=uniforms(keys[: schedule.num_drafting], positions[: schedule.num_drafting, :-1], Role.DRAFT),
        accept_uniform=uniforms(keys, positions[:, :-1], Role.ACCEPT),
        next_uniform=uniforms(keys, positions, Role.RESAMPLE),
    )
