"""The recurrent states of a target: how many slots, what they take, and what cannot be with them."""

from __future__ import annotations

from attention.backends.base import AttentionBackend
from attention.cache.state import StateGroup
from attention.recurrence.registry import recurrences_of
from attention.recurrence.runner import StateRunner
from specdec.config import EngineConfig, state_slots
from specdec.errors import UnsupportedModelError
from specdec.loading.groups import Rows
from specdec.target.probing import TargetProbe


def check_backend_fits(probed: TargetProbe, backend: AttentionBackend) -> None:
    """Refuse recurrent layers where a token's result may not depend on the batch.

    Raises:
        UnsupportedModelError: the backend is batch-invariant and the target has recurrent layers.
    """
    if probed.recurrent_calls and backend.batch_invariant:
        kinds = ", ".join(dict.fromkeys(spec.kind for spec in probed.recurrence_specs))
        raise UnsupportedModelError(
            f"{type(probed.model).__name__} has recurrent layers ({kinds}), which sum a prompt in chunks and a "
            "verification token by token: not with backend='batch_invariant'; use backend='flashinfer'"
        )


def uncapturable(probed: TargetProbe) -> str:
    """Why rounds of a target cannot run from CUDA graphs, in words; "" where its recurrent layers do not prevent it."""
    functions = recurrences_of(probed.model.device)
    if not probed.recurrent_calls or functions.capturable:
        return ""
    return f"recurrent layers are computed by {functions.name} functions, which no CUDA graph can hold"


def state_bytes(probed: TargetProbe, rows: Rows) -> int:
    """Bytes of the states of all rows; 0 for a target without recurrent layers."""
    group = _group(probed, state_slots(rows.max_num_seqs), rows.num_speculative_tokens)
    return group.num_slots * group.bytes_per_row(probed.model.dtype)


def state_runner(probed: TargetProbe, config: EngineConfig) -> StateRunner | None:
    """The states of a target's recurrent layers, allocated; None where it has none."""
    if not probed.recurrent_calls:
        return None
    group = _group(probed, config.num_state_slots, config.num_speculative_tokens)
    return StateRunner(group, probed.model.dtype, probed.model.device)


def _group(probed: TargetProbe, slots: int, num_drafts: int) -> StateGroup:
    return StateGroup(probed.recurrence_specs, slots, num_drafts)
