"""The agreement check on a GPU, in half precision and with rounds from CUDA graphs: the same verdicts as on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from specdec import SpeculativeModel
from specdec.extensions.head_check.check import check_agreement

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("overrides", "verdict", "right"),
    [
        (None, "fine", None),
        ({"aux_layers": [1, 3, 4]}, "misread", {"aux_layers": [2, 4, 5]}),
        ({"feedback": "post_norm"}, "misread", {"feedback": "pre_norm"}),
    ],
)
def test_verdicts(overrides: dict[str, Any] | None, verdict: str, right: dict[str, Any] | None) -> None:
    with SpeculativeModel.from_pretrained("gsm-llama", "auto", device="cuda", head_overrides=overrides) as model:
        assert model.graphs == "on"
        found = check_agreement(model)
        assert found.verdict == verdict and found.chains is not None
        assert (None if found.best is None else dict(found.best.reading.overrides)) == right
        assert check_agreement(model).chains == found.chains  # graphs and hooks are as they were
