"""Slots, memory and CUDA graphs of recurrent states. Imported for targets with recurrent layers alone."""

from __future__ import annotations

from attention.recurrence.functions import recurrences_of
from attention.recurrence.runner import StateRunner
from attention.recurrence.states import StateGroup, fold_rule
from specdec.config import EngineConfig, state_slots
from specdec.extras.recurrent_states import RecurrentStates
from specdec.loading.groups import Rows
from specdec.rounds.extras import RoundExtra
from specdec.wrapped.probing import TargetProbe


def uncapturable(probed: TargetProbe) -> str:
    """Why rounds of a target cannot run from CUDA graphs, in words; "" where its recurrent layers do not prevent it."""
    functions = recurrences_of(probed.model.device)
    if functions.capturable:
        return ""
    return f"recurrent layers are computed by {functions.name} functions, which no CUDA graph can hold"


def state_bytes(probed: TargetProbe, rows: Rows) -> int:
    """Bytes of the states of all rows."""
    group = StateGroup(probed.recurrence_specs, state_slots(rows.max_num_seqs), rows.num_speculative_tokens)
    return group.num_slots * group.bytes_per_row(probed.model.dtype)


def state_runner(probed: TargetProbe, config: EngineConfig) -> StateRunner:
    """The states of a target's recurrent layers, allocated."""
    group = StateGroup(probed.recurrence_specs, config.num_state_slots, config.num_speculative_tokens)
    return StateRunner(group, probed.model.dtype, probed.model.device)


def state_extras(probed: TargetProbe, num_drafts: int) -> tuple[RoundExtra, ...]:
    """The extra of rounds for a target's recurrent layers with K drafts; () without such layers."""
    return (RecurrentStates(fold_rule(probed.recurrence_specs, num_drafts)),) if probed.recurrent_calls else ()
