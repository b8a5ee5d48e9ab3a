"""What cannot run from CUDA graphs is refused by name before anything is changed."""

from __future__ import annotations

import pytest

from attention.backends.invariant import InvariantBackend
from attention.spec import AttentionSpec, TemperatureTuning
from specdec.errors import InvalidInputError
from specdec.loading.backends import check_graphs

PLAIN = AttentionSpec(2, 1, 64, 64, scale=0.125)
LOCAL = AttentionSpec(2, 1, 64, 64, scale=0.125, chunk_size=16)
TUNED = AttentionSpec(2, 1, 64, 64, scale=0.125, temperature=TemperatureTuning(0.1, 8192.0))


@pytest.mark.parametrize("spec", [LOCAL, TUNED], ids=["local", "tuned"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_chunks_and_temperature_tuning_have_no_graphs(spec: AttentionSpec, cuda_graphs: bool) -> None:
    with pytest.raises(InvalidInputError, match=r"chunks and temperature tuning \(Llama 4\) run without CUDA graphs"):
        check_graphs(InvariantBackend(), None, (PLAIN, spec), cuda_graphs)


def test_plain_targets_have_graphs() -> None:
    check_graphs(InvariantBackend(), None, (PLAIN,), True)
