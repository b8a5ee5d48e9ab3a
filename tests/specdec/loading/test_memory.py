"""Device memory at start: the errors name the numbers. The GPU is a fake; tests/gpu has a real one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import eagle3_head, table_head, tiny_llama, wrap

import specdec.loading.assembly
from attention.cache.kv_cache import FP8, KVFormat
from specdec.errors import CacheTooSmallError, InvalidInputError, ModelLoadError, OutOfDeviceMemoryError
from specdec.loading.sizes import Pool, Rows, check_weights_fit, divide_cache, empty_pools
from specdec.wrapped.probing import probe_target

CUDA = torch.device("cuda")
GIB = 1 << 30
TOKEN = 1 << 20


def cache_tokens(asked: int | None, utilization: float, wanted: int = 10**9) -> int:
    """Tokens of the cache of a model with one group that takes 1 MiB a token, for one request of at most `wanted`."""
    rows = Rows(5, wanted, 1, 2048, 16)
    return divide_cache(asked, CUDA, (Pool(TOKEN),), rows, utilization)[0].tokens


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU with 64 of 80 GiB free."""
    return monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (64 * GIB, 80 * GIB))


def test_the_cache_takes_what_is_left(gpu: None) -> None:
    """64 free, less a tenth of 80 that is not ours, less 4 for activations."""
    assert cache_tokens(None, 0.9) == (64 - 8 - 4) * 1024
    assert cache_tokens(None, 0.5) == (64 - 40 - 4) * 1024
    assert cache_tokens(None, 0.9, wanted=1000) == 1000, "not more than is wanted"
    rows, beside = Rows(5, 10**9, 1, 2048, 16), (3 * GIB, 2 * GIB)  # states, and scores of requests with options
    assert divide_cache(None, CUDA, (Pool(TOKEN),), rows, 0.9, *beside)[0].tokens == (64 - 8 - 4 - 5) * 1024


def test_no_room_for_a_cache(gpu: None) -> None:
    message = (
        r"64\.00 GiB of 80\.00 GiB are free on cuda, gpu_memory_utilization=0\.24 leaves 3\.20 GiB of it, and 4\.00 "
        "GiB are reserved for activations and graphs; raise gpu_memory_utilization or take a smaller model"
    )
    with pytest.raises(CacheTooSmallError, match=message):
        cache_tokens(None, 0.24)


def test_a_cache_that_was_asked_for_and_does_not_fit(gpu: None) -> None:
    assert cache_tokens(65536, 0.9, wanted=1) == 65536, "what is asked for may use all that is free"
    message = (
        r"kv_cache_tokens=65537 takes 64\.00 GiB \(1048576 bytes per token\).*"
        r"64\.00 GiB of 80\.00.*room for 65536 tokens"
    )
    with pytest.raises(CacheTooSmallError, match=message):
        cache_tokens(65537, 0.9, wanted=1)


@pytest.mark.parametrize("utilization", [0.0, 1.01, -1.0])
def test_a_share_that_is_none(utilization: float) -> None:
    with pytest.raises(
        InvalidInputError, match=f"gpu_memory_utilization={utilization}: allowed is more than 0, at most 1"
    ):
        wrap(tiny_llama(), gpu_memory_utilization=utilization)


def test_weights_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    size = sum(p.nbytes for p in model.parameters())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (size // 2, GIB))
    check_weights_fit(model, torch.device("cpu"), "here")
    with pytest.raises(ModelLoadError, match=r"weights of 'tiny' take 0\.00 GiB; cuda has 0\.00 GiB of 1\.00 GiB free"):
        check_weights_fit(model, CUDA, "tiny")


def test_running_out_while_the_engine_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 80 * GIB))
    monkeypatch.setattr(specdec.loading.assembly, "check_target", full)
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        wrap(tiny_llama())
    message = str(caught.value)
    assert "ran out of memory while the engine was built: 1.00 GiB of 80.00 GiB are free" in message
    assert "400 tokens" in message and "lower gpu_memory_utilization" in message and "Tried to allocate 2.00" in message


def test_bytes_of_a_token() -> None:
    """Four layers of 2 heads x 16, keys and values, in float32 or 8 bits; the head's layer stays in float32."""
    model = tiny_llama()
    probed = probe_target(model)
    assert empty_pools(probed, None, KVFormat(), 128) == (Pool(4 * 2 * 2 * 16 * 4),)
    assert empty_pools(probed, None, KVFormat(FP8), 128) == (Pool(4 * 2 * 2 * 16),)
    with_head = empty_pools(probed, eagle3_head(model), KVFormat(FP8), 128)
    assert with_head == (Pool(4 * 2 * 2 * 16 + 2 * 2 * 16 * 4),)
    assert empty_pools(probed, table_head(model), KVFormat(), 128) == (Pool(4 * 2 * 2 * 16 * 4 + 2 * 8 * 4),)
