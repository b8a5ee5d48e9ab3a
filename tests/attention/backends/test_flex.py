"""FlexAttention beside its results (tests/attention/test_backends.py): what is compiled, what is sent, what is refused,
and whole rounds over it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import backend_of_ours, eagle3_head, hf_greedy, random_prompts, tiny_llama, wrap
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from attention.backends.base import GraphBackend
from attention.backends.flex import FlexBackend, check_supported
from attention.backends.flex_kernel import FlexKernel, function_of, tile_width
from attention.cache.kv_cache import FP8, CacheGroup, KVFormat
from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec
from specdec.requests.sampling import SamplingParams
from tests.attention.batches import Batch, small_size
from tests.attention.oracle import Rig, Variant

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KEY = AttentionSpec(8, 2, 64, 64, scale=0.125)
GROUP = CacheGroup("target", (KEY,), 8, 16)
HALF = torch.bfloat16
SLOPES = tuple(2.0 ** -(n + 1) for n in range(8))


def attended(rig: Rig, backend: FlexBackend) -> float:
    return rig.errors(rig.attended(rig.runner(backend)))[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "scale", "alibi"),
    [
        *(pytest.param(*own, None, marks=pytest.mark.long) for own in (("NHD", 0.11), ("HND", 0.12))),
        ("HND", 0.1, SLOPES),
    ],
)
@pytest.mark.thorough
def test_all_batches_of_a_tile_size_share_one_compilation(layout: Any, scale: float, alibi: Any) -> None:
    """Traced by torch's compiler, and run operator by operator: sizes are variables from the first call on."""
    counter = CompileCounter()
    key = replace(KEY, scale=scale, alibi=alibi)  # no other test's kernel
    same = ("decode, small", "decode, medium", "decode, large", "single long")
    for compiled, names in ((1, same), (2, ("verify, q = 7", "verify, q = 8"))):
        for name in names:
            rig = Rig(Variant(key, layout=layout), small_size()[name], torch.float32, CPU)
            assert attended(rig, FlexBackend(CPU, counter)) <= 1e-5
        assert counter.frame_count == compiled


class NoReads(TorchDispatchMode):
    """Refuses every operator whose result the host would have to wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        assert not any(word in name for word in ("_local_scalar_dense", "nonzero", "item", "is_nonzero")), name
        return func(*args, **(kwargs or {}))


def test_planning_reads_nothing_back() -> None:
    rig = Rig(Variant(KEY), small_size()["mixed"], torch.float32, CPU)
    runner, metadata = rig.runner(FlexBackend(CPU)), rig.metadata()
    with NoReads():
        runner.plan(metadata)
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            metadata.seq_lens[0].item()


def test_one_copy_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    plain = torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda array: copies.append(array.dtype) or plain(array))
    rig = Rig(Variant(KEY), small_size()["mixed"], torch.float32, CPU)
    runner, metadata = rig.runner(FlexBackend(CPU)), rig.metadata()
    copies.clear()
    runner.plan(metadata)
    assert copies == ["int32"]


def test_rows_may_share_pages_in_different_places() -> None:
    """A page that is the first of one row and the second of another: each row counts its keys by its own order."""
    rig = Rig(Variant(KEY), Batch((2, 2), (14, 30)), torch.float32, CPU)
    (_, keys, values), (other_query, other_keys, other_values) = rig.rows
    table = rig.host.block_table
    table[1, 1] = table[0, 0]
    rig.rows[1] = (other_query, torch.cat([other_keys[:16], keys]), torch.cat([other_values[:16], values]))
    rig.host = replace(rig.host, slot_mapping=rig.host.slot_mapping[[0, 1, 0, 1]])
    assert attended(rig, FlexBackend(CPU)) <= 1e-5


def test_where_the_compiler_is_switched_off_it_says_so() -> None:
    """Uncompiled it would go through the whole cache for every query."""
    kernel = FlexKernel(KEY, torch.float32, torch.float32, 16, 1, 16, "eager")
    with torch.compiler.set_stance("force_eager"), pytest.raises(UnsupportedAttentionError, match="switched off"):
        function_of(kernel)(torch.zeros(1))


@pytest.mark.parametrize(
    ("key", "dtype", "page_size", "keys"),
    [
        (KEY, HALF, 16, 16),
        (KEY, HALF, 64, 64),
        (KEY, HALF, 256, 128),
        (KEY, HALF, 48, 16),
        (replace(KEY, head_dim_k=80), torch.float32, 64, 32),
        (replace(KEY, head_dim_k=256), torch.float32, 64, 16),
    ],
)
def test_keys_of_a_tile(key: AttentionSpec, dtype: torch.dtype, page_size: int, keys: int) -> None:
    assert tile_width(FlexKernel(key, dtype, dtype, page_size, 1, 16, "inductor")) == keys


@pytest.mark.parametrize(
    ("key", "group", "message"),
    [
        (replace(KEY, value_in_key=True), GROUP, "does not serve MLA; use backend='flashinfer' or 'torch'"),
        (replace(KEY, num_q_heads=5), GROUP, "the 5 query heads to be a multiple of the 2 KV heads"),
        (
            replace(KEY, head_dim_k=8, head_dim_v=8),
            GROUP,
            "head dims from 16 to 256; given 8 and 8; use backend='torch'",
        ),
        (KEY, replace(GROUP, page_size=24), "page sizes that 16 divides; given 24; use backend='torch'"),
        (KEY, replace(GROUP, num_pages=1 << 20), r"at most 2,147,483,647 numbers; given 2,147,483,648: lower kv_cache"),
        (
            KEY,
            replace(GROUP, format=KVFormat(FP8)),
            "on NVIDIA GPUs from compute capability 8.9 on; use kv_cache_dtype='auto'",
        ),
    ],
)
def test_what_is_refused_on_cuda(
    key: AttentionSpec, group: CacheGroup, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    with pytest.raises(UnsupportedAttentionError, match=message):
        check_supported(group, key, HALF, CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    for dim in (16, 80, 96, 112, 128, 160, 192, 256):
        check_supported(replace(GROUP, format=KVFormat(FP8)), replace(KEY, head_dim_k=dim, head_dim_v=dim), HALF, CUDA)


def test_8_bits_are_refused_on_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    with pytest.raises(UnsupportedAttentionError, match="8 bits on NVIDIA GPUs"):
        check_supported(replace(GROUP, format=KVFormat(FP8)), KEY, HALF, CUDA)
    check_supported(GROUP, KEY, HALF, CUDA)


def test_what_it_is() -> None:
    backend = FlexBackend(CPU)
    assert not isinstance(backend, GraphBackend) and not backend.batch_invariant
    assert backend.route(GROUP, KEY, HALF) == "torch FlexAttention, eager, cache bfloat16"
    assert FlexBackend(CUDA).route(GROUP, KEY, HALF) == "torch FlexAttention, compiled, cache bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.long), 3])
@pytest.mark.thorough
def test_rounds_give_the_models_own_tokens(drafts: int) -> None:
    prompts = random_prompts((5, 33, 1))
    with backend_of_ours(FlexBackend(CPU)):
        head = eagle3_head(tiny_llama()) if drafts else None
        wrapped = wrap(tiny_llama(), head, num_speculative_tokens=drafts, page_size=4)
        assert wrapped.backend_name == "flex"
        completions = wrapped.generate(prompts, SamplingParams(max_new_tokens=8))
    assert [c.token_ids for c in completions] == [hf_greedy(p, 8) for p in prompts]
