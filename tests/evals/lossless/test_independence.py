"""The noise of keyed sampling is independent and fine, and defects of it are seen."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from evals.lossless.certificate import PLANTED
from evals.lossless.independence import noise_streams
from specdec.rounds import randomness
from specdec.rounds.randomness import noise_seeds, request_key

pytest.importorskip("scipy")


def test_the_librarys_noise_passes_and_sharing_two_in_a_hundred_would_be_found() -> None:
    found = noise_streams()
    assert found["verdict"] == "PASS" and found["repeated"] < 5 and found["least_share"] < 0.02
    assert set(found["p_values"]) == {"neighbouring positions", "samples of one seed", "neighbouring seeds"}


OTHERS: list[tuple[str, str, Any, str, Any]] = [
    ("streams", "noise of the row", randomness, "noise_seeds", lambda keys, at: noise_seeds(keys, 0 * at)),
    ("streams", "seed left out", randomness, "request_key", lambda _, sample: request_key(0, sample)),
]


@pytest.mark.parametrize("planted", [*(one for one in PLANTED if one[0] == "streams"), *OTHERS], ids=lambda one: one[1])
def test_planted_noise_fails(planted: tuple[str, str, Any, str, Any]) -> None:
    with patch.object(*planted[2:]):
        assert noise_streams()["verdict"] == "FAIL"


def test_as_many_equal_pairs_as_stated_are_found_nearly_always() -> None:
    """Of one position in so many the noise is that of the position before."""
    share = noise_streams()["least_share"]

    def shared(keys: Any, at: Any) -> Any:
        return noise_seeds(keys, at - ((at % 2 == 1) & (at * 2654435761 % 1000 < 1000 * 1.3 * share)))

    with patch.object(randomness, "noise_seeds", shared):
        assert noise_streams()["p_values"]["neighbouring positions"] < 1e-3 / 3
