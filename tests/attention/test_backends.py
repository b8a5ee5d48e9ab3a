"""Every attention backend on realistic batches against an oracle in float32, and what each refuses, by name.

On a CPU: the torch reference, Flex in torch's eager form, and our own kernels in Triton's interpreter (a few cases). On
a GPU everything, at the sizes of real batches. A backend that needs a wider tolerance than the others fails, but for
what `WIDER` says.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from attention.backends.base import AttentionBackend
from attention.backends.flashinfer.backend import check_supported as check_flashinfer
from attention.backends.flex import FlexBackend
from attention.backends.flex import check_supported as check_flex
from attention.backends.invariant import InvariantBackend, InvariantBuilder, run_invariant
from attention.backends.reference import TorchBackend
from attention.cache.kv_cache import FP8, CacheGroup, KVFormat, LayerKV, write
from attention.errors import UnsupportedAttentionError
from attention.spec import AttentionSpec
from tests.attention.batches import full_size, small_size
from tests.attention.oracle import Rig, Variant, expected_row

CPU = torch.device("cpu")
LIMIT = {torch.float32: 1e-5, torch.bfloat16: 3e-3, torch.float16: 1e-3}
HALF = (torch.bfloat16, torch.float16)
SLOPES = tuple(2.0 ** -(n + 1) for n in range(8))
"""Of 8 heads, as Press et al. choose them."""
Check = Callable[[CacheGroup, AttentionSpec, torch.dtype], None]


def variants(window: int, usual: int) -> dict[str, Variant]:
    """Options, one at a time and the combinations that models have.

    `window`: hides keys of most rows. `usual`: head dim where nothing else is said.
    """

    def plain(heads: tuple[int, int] = (8, 2), dim: int = usual, **options: Any) -> AttentionSpec:
        return AttentionSpec(*heads, dim, dim, scale=dim**-0.5, **options)

    head_dims = {f"head dim {d}": Variant(plain(dim=d)) for d in (16, 64, 80, 96, 112, 128, 160, 192, 256)}
    ratios = {f"{q} heads to {kv}": Variant(plain((q, kv))) for q, kv in ((2, 2), (6, 2), (7, 1), (16, 1))}
    pages = {f"pages of {n}": Variant(plain(), page_size=n) for n in (1, 8, 32, 64)}
    return {
        "plain": Variant(plain()),
        **ratios,
        **head_dims,
        **pages,
        "HND": Variant(plain(), layout="HND"),
        "HND, pages of 32, window": Variant(plain(window=window), 32, "HND"),
        "window": Variant(plain(window=window)),
        "window of one": Variant(plain(window=1)),
        "window over all": Variant(plain(window=100_000)),
        "softcap": Variant(plain(softcap=3.0)),
        "softcap and window": Variant(plain(softcap=3.0, window=window)),
        "sinks": Variant(plain(has_sinks=True)),
        "sinks and window": Variant(plain(has_sinks=True, window=window)),
        "sinks and softcap": Variant(plain(has_sinks=True, softcap=3.0)),
        "ALiBi": Variant(plain(alibi=SLOPES)),
        "ALiBi, everything": Variant(
            plain(alibi=SLOPES, window=window, softcap=3.0, has_sinks=True),
            layout="HND",
            format=KVFormat(FP8, ((0.5, 0.25),)),
        ),
        "8 bits": Variant(plain(), format=KVFormat(FP8)),
        "8 bits, scaled": Variant(plain(), format=KVFormat(FP8, ((0.5, 0.125),))),
        "8 bits, window, HND": Variant(plain(window=window), layout="HND", format=KVFormat(FP8, ((0.5, 0.25),))),
        "8 bits, head dim 80": Variant(plain(dim=80), format=KVFormat(FP8, ((0.5, 0.25),))),
        "wide keys": Variant(AttentionSpec(8, 2, 192, 128, scale=192**-0.5)),
        "wide keys, sinks": Variant(AttentionSpec(8, 2, 192, 128, scale=192**-0.5, has_sinks=True)),
        "MLA": Variant(AttentionSpec(16, 1, 576, 512, scale=192**-0.5, value_in_key=True)),
        "head dim 512": Variant(plain(dim=512)),
        "head dim 80, everything": Variant(plain(dim=80, window=window, softcap=3.0, has_sinks=True), 8, "HND"),
        "MLA, HND": Variant(AttentionSpec(16, 1, 576, 512, scale=192**-0.5, value_in_key=True), layout="HND"),
        "MLA of rank 32": Variant(AttentionSpec(4, 1, 48, 32, scale=0.2, value_in_key=True)),
    }


VARIANTS = {"cpu": variants(window=9, usual=64), "cuda": variants(window=100, usual=128)}
"""128 is what fa3 and most models have; 64 is quicker in the interpreter."""
BATCHES = {"cpu": small_size(), "cuda": full_size()}
EVERY_BATCH = ("plain", "HND, pages of 32, window", "8 bits, scaled", "MLA", "head dim 80")
"""Variants that run on every batch; the others on `FEW_BATCHES`, except by the reference, which is quick."""
FEW_BATCHES = ("decode, medium", "mixed", "verify, q = 6", "single long, q = 6")
ONE_BATCH = {("flex", "cuda"): ("mixed",)}
"""Instead of `FEW_BATCHES` where each size of tiles is compiled for every variant."""
NOT_ON_CUDA = {
    ("flex", "pages of 1"): "page sizes that 16 divides; given 1",
    ("flex", "pages of 8"): "divides; given 8",
    ("flex", "head dim 512"): "takes head dims from 16 to 256; given 512",
    ("flex", "head dim 80, everything"): "divides; given 8",
}
"""What the compiled form refuses besides."""


@dataclass(frozen=True)
class Contender:
    """A backend: how it is made, how it refuses, and what it refuses.

    Attributes:
        check: raises what `AttentionBackend.builder` raises, without a device.
        dtypes: of queries; others are refused with a message that matches `other_dtype`.
        refused: by variant, what the refusal says.
        fixed: planned for a CUDA graph instead, batches of equal queries only.
    """

    make: Callable[[torch.device], AttentionBackend]
    check: Check
    dtypes: tuple[torch.dtype, ...]
    refused: dict[str, str]
    other_dtype: str = ""
    fixed: bool = False

    def batches(self, size: str) -> list[str]:
        """The batches that its plans can hold."""
        return [name for name, batch in BATCHES[size].items() if batch.even or not self.fixed]


def made_flashinfer(device: torch.device) -> AttentionBackend:
    from attention.backends.flashinfer.backend import FlashInferBackend

    return FlashInferBackend(device)


ALIBI = ("ALiBi", "ALiBi, everything")
EIGHT_BITS = ("8 bits", "8 bits, scaled", "8 bits, window, HND", "8 bits, head dim 80")
LATENT = ("MLA", "MLA, HND", "MLA of rank 32")
FLASHINFER = Contender(
    made_flashinfer,
    check_flashinfer,
    HALF,
    {
        **dict.fromkeys(ALIBI, "has no ALiBi slopes; use backend='flex' or 'torch'"),
        "pages of 8": r"takes page sizes \(1, 16, 32, 64\); given 8",
        "sinks and softcap": "no attention sinks together with a softcap; use backend='torch'",
        "MLA of rank 32": r"latents of width 512 .* and 64 .* given 32 and 16; use backend='torch'",
    },
    other_dtype="no torch.float32 attention, only float16 and bfloat16; use backend='torch'",
)
CONTENDERS = {
    "torch": Contender(TorchBackend, TorchBackend(CPU).builder, (torch.float32, *HALF), {}),
    "torch, exact sums": Contender(
        lambda device: TorchBackend(device, exact=True),
        TorchBackend(CPU, exact=True).builder,
        (torch.float32, *HALF),
        dict.fromkeys((*EIGHT_BITS, *LATENT, "ALiBi, everything"), "has no MLA, no cache in 8 bits"),
    ),
    "flex": Contender(
        FlexBackend,
        FlexBackend(CPU).builder,
        (torch.float32, *HALF),
        dict.fromkeys(LATENT, "does not serve MLA; use backend='flashinfer' or 'torch'"),
    ),
    "flashinfer": FLASHINFER,
    "flashinfer, fixed": replace(FLASHINFER, fixed=True),
    "batch_invariant": Contender(
        lambda device: InvariantBackend(),
        InvariantBackend().builder,
        HALF,
        {
            **dict.fromkeys(ALIBI, "has no ALiBi slopes; use backend='flex' or 'torch'|has no cache in 8 bits"),
            **dict.fromkeys(EIGHT_BITS, "has no cache in 8 bits; use kv_cache_dtype='auto'"),
            **dict.fromkeys(LATENT, "does not serve MLA; use backend='flashinfer'"),
        },
        other_dtype="takes float16 and bfloat16, given torch.float32",
    ),
}
WIDER = {("flashinfer", "8 bits"): 4e-3, ("flashinfer", "MLA"): 5e-3}
"""What FlashInfer's kernels need on an H200, by the beginning of a variant's name: with a cache in 8 bits it rounds
weights to half precision before the values' scale, and MLA rounds partial results of split-KV."""


LONG = {("flashinfer", "single long, q = 6"): 4e-3}
"""The same by batch: rows of 65,536 keys that our packed kernel does not serve (7 and 16 heads to 1, head dim 256) come
out at 3.2e-3; FlashInfer's fa2 rounds the weights to half precision and adds up many parts."""


def limit(name: str, variant: str, batch: str, dtype: torch.dtype) -> float:
    wider = [w for (backend, begin), w in WIDER.items() if name.startswith(backend) and variant.startswith(begin)]
    wider += [w for (backend, at), w in LONG.items() if name.startswith(backend) and batch == at]
    return max(LIMIT[dtype], *wider) if wider else LIMIT[dtype]


def cases(size: str, names: Iterable[str]) -> list[tuple[str, str, str]]:
    """(variant, batch, contender) of all that is served, contenders of the same states one after the other."""
    return [
        (variant, batch, name)
        for variant in VARIANTS[size]
        for batch in BATCHES[size]
        for name in names
        if variant not in CONTENDERS[name].refused and batch in CONTENDERS[name].batches(size)
        if variant in EVERY_BATCH
        or batch in ONE_BATCH.get((name, size), FEW_BATCHES)
        or (name, size) == ("torch", "cpu")
        if size == "cpu" or (name, variant) not in NOT_ON_CUDA
    ]


@pytest.mark.parametrize("name", [name for name, contender in CONTENDERS.items() if not contender.fixed])
def test_a_variant_is_served_or_refused_by_name(name: str) -> None:
    contender = CONTENDERS[name]
    for (variant, case), dtype in itertools.product(VARIANTS["cpu"].items(), HALF):
        if variant not in contender.refused:
            contender.check(case.group(4), case.key, dtype)
            continue
        with pytest.raises(UnsupportedAttentionError, match=contender.refused[variant]):
            contender.check(case.group(4), case.key, dtype)


@pytest.mark.parametrize(("name", "variant"), NOT_ON_CUDA)
def test_what_only_a_compiled_form_refuses(name: str, variant: str) -> None:
    case = VARIANTS["cuda"][variant]
    with pytest.raises(UnsupportedAttentionError, match=NOT_ON_CUDA[name, variant]):
        check_flex(case.group(4), case.key, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize(
    "name", [name for name, contender in CONTENDERS.items() if torch.float32 not in contender.dtypes]
)
def test_a_dtype_is_refused_by_name(name: str) -> None:
    case = VARIANTS["cpu"]["plain"]
    with pytest.raises(UnsupportedAttentionError, match=CONTENDERS[name].other_dtype):
        CONTENDERS[name].check(case.group(4), case.key, torch.float32)


@lru_cache(maxsize=2)
def rig(size: str, variant: str, batch: str, dtype: torch.dtype) -> Rig:
    """One batch's states; all contenders get the same."""
    return Rig(VARIANTS[size][variant], BATCHES[size][batch], dtype, torch.device(size))


def check(name: str, size: str, variant: str, batch: str, dtype: torch.dtype) -> None:
    """One contender on one batch: the result, each row of it, and what was written to the cache."""
    given, contender = rig(size, variant, batch, dtype), CONTENDERS[name]
    runner = given.runner(contender.make(torch.device(size)))
    whole, worst = given.errors(given.attended(runner, contender.fixed))
    most = limit(name, variant, batch, dtype)
    assert whole <= most and worst <= 2 * most, f"{whole:.1e} in all, {worst:.1e} in a row; allowed {most:.0e}"
    given.assert_written(runner)


def quick(variant: str, batch: str, name: str) -> Any:
    """`make test-quick` has every batch of the plain variant, and every variant on the mixed batch.

    `make test` has half of the other pairs: each variant on every second batch, each batch with every second variant.
    """
    kept = variant == "plain" or batch == "mixed"
    place = list(VARIANTS["cpu"]).index(variant) + list(BATCHES["cpu"]).index(batch)
    return pytest.param(variant, batch, name, marks=() if kept else (pytest.mark.slow, pytest.mark.long)[place % 2])


@pytest.mark.parametrize(("variant", "batch", "name"), [quick(*case) for case in cases("cpu", ["torch", "flex"])])
def test_on_a_cpu(name: str, variant: str, batch: str) -> None:
    check(name, "cpu", variant, batch, torch.float32)


@pytest.mark.parametrize("variant", ["plain", "softcap", "sinks", "8 bits, scaled", "MLA"])
@pytest.mark.parametrize("batch", ["mixed", "verify, q = 5"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["torch", "flex"])
def test_half_precision(name: str, dtype: torch.dtype, batch: str, variant: str) -> None:
    if variant not in CONTENDERS[name].refused:
        check(name, "cpu", variant, batch, dtype)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU is here: the kernels run compiled below")
@pytest.mark.parametrize(
    ("variant", "batch"),
    [
        ("plain", "mixed"),
        ("HND, pages of 32, window", "verify, q = 6"),
        ("head dim 80, everything", "mixed"),
        ("wide keys, sinks", "verify, q = 4"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("sinks and softcap", "mixed"),
                ("pages of 1", "verify, q = 2"),
                ("7 heads to 1", "prefill"),
                ("window", "single long, q = 6"),
                *((f"head dim {dim}", "mixed") for dim in (16, 112, 192)),
                ("head dim 512", "verify, q = 3"),
            )
        ),
        *(pytest.param(f"head dim {dim}", "mixed", marks=pytest.mark.long) for dim in (80, 96, 160)),
        pytest.param("wide keys", "mixed", marks=pytest.mark.long),
    ],
)
@pytest.mark.cases(1)
def test_our_kernel_in_the_interpreter(variant: str, batch: str) -> None:
    """float16: the interpreter cuts bfloat16 off where a GPU rounds.

    Heads that are no power of two are padded inside the kernel: columns that lie in the next head, or behind the cache,
    count for nothing.
    """
    check("batch_invariant", "cpu", variant, batch, torch.float16)


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU is here: the kernels run compiled below")
@pytest.mark.parametrize(
    "variant",
    [
        "8 bits, scaled",
        pytest.param("8 bits, head dim 80", marks=pytest.mark.long),
        pytest.param("8 bits, window, HND", marks=pytest.mark.slow),
    ],
)
@pytest.mark.cases(1)
def test_our_kernel_reads_8_bits(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of FlashInfer's backend. The interpreter cuts off where it writes 8 bits; so the reference writes."""

    def written(layer: LayerKV, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        write(layer, key[: len(slots)], value[: len(slots)], slots)

    monkeypatch.setattr("attention.kernels.cache_write.write_kv", written)
    given = rig("cpu", variant, "mixed", torch.float16)
    (layer,) = given.runner(TorchBackend(CPU)).layers
    query, *states = given.new_states()
    plan, metadata = InvariantBuilder().build(given.metadata()), given.metadata()
    out = run_invariant(plan, given.key, query, *states, layer, metadata)
    assert given.errors(out)[1] <= LIMIT[torch.float16]
    forgotten = replace(layer, value_scale=layer.value_scale * 2)
    assert given.errors(run_invariant(plan, given.key, query, *states, forgotten, metadata))[0] > LIMIT[torch.float16]


@pytest.mark.gpu
@pytest.mark.parametrize(("variant", "batch", "name"), cases("cuda", CONTENDERS))
def test_on_a_gpu(name: str, variant: str, batch: str) -> None:
    check(name, "cuda", variant, batch, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "batch", "dtype"),
    [
        (name, batch, dtype)
        for name, contender in CONTENDERS.items()
        for batch in ("decode, medium", "mixed", "verify, q = 6")
        for dtype in (torch.float16, torch.float32)
        if dtype in contender.dtypes and batch in contender.batches("cuda")
    ],
)
def test_other_dtypes_on_a_gpu(dtype: torch.dtype, name: str, batch: str) -> None:
    check(name, "cuda", "plain", batch, dtype)


def check_padding(name: str, size: str, variant: str, batch: str, dtype: torch.dtype) -> None:
    """Rounds by segments: padded tensors, and a result that is written where the next graph reads it."""
    given, contender = rig(size, variant, batch, dtype), CONTENDERS[name]
    runner, states, tokens = given.runner(contender.make(torch.device(size))), given.new_states(), given.host.num_tokens
    padded = [torch.cat([x, x.new_full((9, *x.shape[1:]), float("nan"))]) for x in states]
    out = states[0].new_full((tokens + 9, given.key.num_q_heads, given.key.head_dim_v), 7.0)
    assert runner.attend(runner.plan(given.metadata()), 0, *padded, given.sinks, out) is out
    assert given.errors(out[:tokens])[0] <= limit(name, variant, batch, dtype) and bool((out[tokens:] == 7).all())
    given.assert_written(runner)


@pytest.mark.parametrize("batch", ["mixed", "verify, q = 3", "prefill"])
@pytest.mark.parametrize(
    ("name", "dtype"), [("torch", torch.float32), ("flex", torch.float32), ("batch_invariant", torch.float16)]
)
@pytest.mark.cases(1)
def test_padding_is_neither_written_nor_attended(name: str, dtype: torch.dtype, batch: str) -> None:
    if name == "batch_invariant" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a GPU is here: the kernel runs compiled below")
    check_padding(name, "cpu", "sinks and window", batch, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", ["mixed", "verify, q = 3", "prefill"])
@pytest.mark.parametrize("name", [name for name, contender in CONTENDERS.items() if not contender.fixed])
def test_padding_on_a_gpu(name: str, batch: str) -> None:
    check_padding(name, "cuda", "plain", batch, torch.bfloat16)


def broken(given: Rig, defect: str) -> torch.Tensor:
    """The reference's answer to a slightly different question."""
    key = given.key
    keys = {
        "window one longer": replace(key, window=(key.window or 0) + 1),
        "no softcap": replace(key, softcap=None),
        "no sinks": replace(key, has_sinks=False),
        "another scale": replace(key, scale=key.scale * 1.01),
    }
    other = Rig(replace(given.variant, key=keys.get(defect, key)), given.batch, given.dtype, CPU)
    other.rows, other.sinks = given.rows, None if defect == "no sinks" else given.sinks
    runner = other.runner(TorchBackend(CPU))
    (layer,) = runner.layers
    if defect == "a foreign key":
        at = (other.host.block_table[0, 0], 1)
        layer.keys[at] = layer.keys[other.host.block_table[1, 0], 1]
    if defect == "a forgotten scale":
        runner.layers = (replace(layer, value_scale=1.0),)
    return other.attended(runner)


@pytest.mark.parametrize(
    ("variant", "defect"),
    [
        ("window", "window one longer"),
        ("softcap", "no softcap"),
        ("sinks", "no sinks"),
        ("plain", "another scale"),
        ("plain", "a foreign key"),
        ("8 bits, scaled", "a forgotten scale"),
    ],
)
def test_the_comparison_sees_a_defect(variant: str, defect: str) -> None:
    given = rig("cpu", variant, "mixed", torch.float32)
    assert given.errors(given.attended(given.runner(TorchBackend(CPU))))[0] <= LIMIT[torch.float32]
    assert given.errors(broken(given, defect))[0] > LIMIT[torch.bfloat16]


def test_the_comparison_sees_what_was_not_written() -> None:
    given = rig("cpu", "plain", "mixed", torch.float32)
    runner = given.runner(TorchBackend(CPU))
    with pytest.raises(AssertionError):
        given.assert_written(runner)


def test_the_oracle_by_hand() -> None:
    """Two keys with equal scores, and a sink of the same: a third each."""
    key = AttentionSpec(1, 1, 1, 1, scale=1.0, has_sinks=True)
    query, keys, values = torch.zeros(2, 1, 1), torch.ones(2, 1, 1), torch.tensor([3.0, 9.0]).view(2, 1, 1)
    assert expected_row(key, query, keys, values, torch.zeros(1)).flatten().tolist() == pytest.approx([1.5, 4.0])
    assert expected_row(replace(key, window=1), query, keys, values, None).flatten().tolist() == [3.0, 9.0]
