"""A request with a small draft model moves between engines with the model's pages."""

from __future__ import annotations

import pytest
from fakes import tiny_llama, wrap

from tests.specdec.extensions.handoff.test_transfers import PARAMS, PROMPTS, SIZES, lived, moved


@pytest.mark.slow
@pytest.mark.thorough
def test_a_small_models_pages_move() -> None:
    small = {"draft": tiny_llama(context=0.1)}
    p, d, stays = (wrap(tiny_llama(), **small, **SIZES) for _ in range(3))
    expected = lived(stays.generate(PROMPTS, PARAMS))
    assert lived(moved(p, d, PROMPTS, PARAMS)) == expected
