"""The model that calls of transformers' own are tried on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from fakes import tiny_llama


@pytest.fixture(scope="module")
def target() -> Any:
    model = copy.deepcopy(tiny_llama())
    model.generation_config.pad_token_id = 0
    return model
