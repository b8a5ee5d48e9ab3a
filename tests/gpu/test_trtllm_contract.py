"""The fakes of the Blackwell route have the signatures of the installed FlashInfer; any GPU will do."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.attention.backends.flashinfer.test_trtllm import Fakes


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("flashinfer.decode", "trtllm_batch_decode_with_kv_cache"),
        ("flashinfer.prefill", "trtllm_batch_context_with_kv_cache"),
    ],
)
def test_signatures(module: str, name: str) -> None:
    real: Any = inspect.unwrap(getattr(pytest.importorskip(module), name))
    fake = inspect.signature(getattr(Fakes(), name)).parameters
    installed = inspect.signature(real).parameters
    assert [(p.name, p.default, p.kind) for p in fake.values()] == [
        (p.name, p.default, p.kind) for p in installed.values()
    ]
