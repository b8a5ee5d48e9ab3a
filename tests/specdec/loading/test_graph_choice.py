"""What cannot run from CUDA graphs is refused by name before anything is changed, and runs without where it may."""

from __future__ import annotations

import pytest

from attention.backends.invariant import InvariantBackend
from attention.spec import AttentionSpec, TemperatureTuning
from specdec.errors import InvalidInputError
from specdec.loading.backends import check_graphs, choose_graphs

PLAIN = AttentionSpec(2, 1, 64, 64, scale=0.125)
LOCAL = AttentionSpec(2, 1, 64, 64, scale=0.125, chunk_size=16)
TUNED = AttentionSpec(2, 1, 64, 64, scale=0.125, temperature=TemperatureTuning(0.1, 8192.0))
REASON = r"attention in chunks and temperature tuning \(Llama 4\) run without CUDA graphs"


class Backend(InvariantBackend):
    """It has graphs and needs none."""

    name, batch_invariant = "flexible", False


@pytest.mark.parametrize("spec", [LOCAL, TUNED], ids=["local", "tuned"])
def test_chunks_and_temperature_tuning_have_no_graphs(spec: AttentionSpec) -> None:
    for backend, cuda_graphs in ((InvariantBackend(), True), (InvariantBackend(), False), (Backend(), True)):
        with pytest.raises(InvalidInputError, match=REASON):
            check_graphs(backend, None, (PLAIN, spec), cuda_graphs)
    with pytest.raises(InvalidInputError, match=REASON):
        choose_graphs(InvariantBackend(), None, (PLAIN, spec), "auto")
    with pytest.raises(InvalidInputError, match=REASON):
        choose_graphs(Backend(), None, (PLAIN, spec), True)
    choice = choose_graphs(Backend(), None, (PLAIN, spec), "auto")
    assert (choice.wanted, choice.expected) == (False, False) and "Llama 4" in choice.reason


def test_plain_targets_have_graphs() -> None:
    check_graphs(InvariantBackend(), None, (PLAIN,), True)
    assert choose_graphs(Backend(), None, (PLAIN,), "auto").wanted
