"""A kernel of recurrent layers that comes out wrong is refused at load, in half precision too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import CPU, wrap

from attention.recurrence import functions as reference
from attention.recurrence.functions import REFERENCE, Recurrences, recurrences_of
from attention.recurrence.runner import StateRunner
from attention.recurrence.states import ConvSpec, DeltaSpec, ScanSpec, SsdSpec, StateGroup
from specdec.errors import UnsupportedModelError
from specdec.selftest.recurrences import recurrence_self_test
from specdec.selftest.selftest import check_target, self_test
from specdec.selftest.twin import TwinReport
from specdec.wrapped.probing import probe_target
from tests.hybrids import RecallHead, tiny_hybrid
from tests.specdec.selftest.test_rollback import DEFECTS

SCANS = {
    "gated delta": DeltaSpec(1, 2, 16, 8, vector_gate=False),
    "a gate per channel": DeltaSpec(2, 2, 8, 8, vector_gate=True),
    "Mamba2": SsdSpec(4, 8, 2, 6),
    "Mamba1": ScanSpec(24, 4),
}
CONV = ConvSpec(24, 4)


def runner_of(spec: Any, functions: Recurrences, dtype: torch.dtype, drafts: int = 3) -> StateRunner:
    states = StateRunner(StateGroup((spec, spec), 4, drafts), dtype, CPU)
    states.functions = functions
    return states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [CONV, *SCANS.values()], ids=["convolution", *SCANS])
@pytest.mark.cases(1)
def test_right_functions_pass_and_wrong_ones_do_not(spec: Any, dtype: torch.dtype) -> None:
    recurrence_self_test(runner_of(spec, replace(REFERENCE, name="the same"), dtype))
    recurrence_self_test(runner_of(spec, replace(REFERENCE, name="the same"), dtype, drafts=0))
    for name, functions in DEFECTS.items():
        if (spec is CONV) != name.startswith("ring"):
            continue
        for drafts in (3, 1) if name != "wrong slot" else (3, 1, 0):
            with pytest.raises(UnsupportedModelError, match=r"comes out wrong on cpu: .* by planted functions"):
                recurrence_self_test(runner_of(spec, functions, dtype, drafts))
                pytest.fail(f"not seen: {name} with K={drafts}")


def not_stored_after_a_replay(*inputs: Any) -> torch.Tensor:
    state, rows = inputs[-3], inputs[-1]
    before, out = state.clone(), reference.gated_delta(*inputs)
    slots = rows.slots[(rows.replay > 0) & (rows.num_new > 0)].long()
    state[slots] = before[slots]
    return out


def stored_though_put_off(*inputs: Any) -> torch.Tensor:
    rows = inputs[-1]
    return reference.gated_delta(*inputs[:-1], replace(rows, num_new=rows.num_new.clamp_min(1)))


@pytest.mark.parametrize("drafts", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("defect", [not_stored_after_a_replay, stored_though_put_off])
def test_states_that_are_stored_in_some_launches_only(drafts: int, defect: Any) -> None:
    functions = replace(REFERENCE, name="planted", gated_delta=defect)
    with pytest.raises(UnsupportedModelError, match="comes out wrong"):
        recurrence_self_test(runner_of(SCANS["gated delta"], functions, torch.bfloat16, drafts))


def test_nan_and_outputs_of_no_row_are_noticed() -> None:
    def spoilt(value: float) -> Recurrences:
        def conv(*inputs: Any) -> torch.Tensor:
            out = reference.short_conv(*inputs)
            out[-1] = value
            return out

        return replace(REFERENCE, name="planted", short_conv=conv)

    for value in (0.5, float("nan")):
        with pytest.raises(UnsupportedModelError, match="outputs in launch 1 of ConvSpec"):
            recurrence_self_test(runner_of(CONV, spoilt(value), torch.float32))


@pytest.mark.slow
@pytest.mark.thorough
def test_loading_runs_it_where_logits_in_half_precision_show_nothing() -> None:
    model = tiny_hybrid("qwen3_next").bfloat16()
    head = RecallHead([[1, 2]], 0.6).bfloat16()
    target = wrap(model, head, num_speculative_tokens=3, max_model_len=128).target
    target.states.functions = DEFECTS["drafts folded in"]
    assert self_test(target) < 0.15  # of 0.2 that are allowed
    with pytest.raises(UnsupportedModelError, match="gated delta rule of the model's recurrent layers comes out wrong"):
        check_target(target, probe_target(model), 128, TwinReport(()))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.long)])
@pytest.mark.thorough
def test_the_kernels_pass_in_the_interpreter(dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("with a GPU every load of a hybrid target there runs it")
    for spec in (CONV, *SCANS.values()):
        recurrence_self_test(runner_of(spec, recurrences_of(torch.device("cuda")), dtype))
