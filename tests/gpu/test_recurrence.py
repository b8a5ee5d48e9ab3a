"""The kernels of recurrences, compiled, against the rules token by token in float64."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from attention.recurrence import delta_kernel, tokens_kernel
from attention.recurrence.conv_kernel import short_conv
from attention.recurrence.delta_kernel import ShortTiling, gated_delta
from attention.recurrence.kernel_rows import StateTiling
from attention.recurrence.scan_kernel import selective_scan
from attention.recurrence.ssd_kernel import ssd_scan
from tests.attention.recurrence import token_by_token as oracle
from tests.attention.recurrence.recurrence_cases import (
    apart,
    checked,
    close,
    conv_case,
    delta_case,
    same_rings,
    scan_case,
    ssd_case,
)
from tests.attention.recurrence.token_by_token import StateRows

CUDA = torch.device("cuda")
K, RING = 3, 7
VERIFY = [(4, 1, 9, 3, 1), (4, 5, 12, 0, 1), (1, 3, 7, 2, 1), (2, 4, 6, 1, 1), (12, 2, 0, 0, 12), (4, 0, 0, 0, 1)]
"""(tokens, slot, start, replay, num_new): full rounds, fewer drafts, a short prompt, a padding row."""
LONG = [(200, 1, 0, 0, 200), (4, 2, 9, 3, 1), (65, 3, 40, 0, 65), (17, 4, 5, 0, 15), (130, 5, 77, 2, 128)]
"""Prompts, chunks of them, a round, drafts after a chunk, replay before a chunk (its drafts far from the replayed)."""
DTYPES = [torch.float32, torch.bfloat16]
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""Outputs of bfloat16 are rounded to 8 bits."""


def on_gpu(case: dict[str, Any]) -> dict[str, Any]:
    def moved(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.to(CUDA)
        if hasattr(x, "__dataclass_fields__"):
            return replace(x, **{f.name: getattr(x, f.name).to(CUDA) for f in fields(x)})
        return x

    return {name: moved(x) for name, x in case.items()}


def delta(rows: list[Any], shape: Any, vector: bool, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    return on_gpu(delta_case(sum(r[0] for r in rows) + 3, *shape, vector, dtype, ring_size=RING))


QWEN, KIMI, OLMO = ((16, 32), (128, 128)), ((32, 32), (128, 128)), ((30, 30), (96, 192))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "vector"), [(QWEN, False), (KIMI, True), (OLMO, False), (((2, 4), (64, 64)), False)])
def test_delta_of_a_round(shape: Any, vector: bool, dtype: torch.dtype) -> None:
    case = delta(VERIFY, shape, vector, dtype)
    checked(gated_delta, oracle.gated_delta, case, StateRows.of(VERIFY, CUDA), LIMITS[dtype], 2e-6)


@pytest.mark.parametrize(
    "tiling",
    [
        StateTiling(b, p, w, r)
        for b, p, w, r in ((32, 32, 8, 80), (64, 32, 8, 80), (128, 32, 8, None), (16, 16, 4, None))
    ],
)
def test_delta_of_every_tiling(tiling: StateTiling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token."""
    monkeypatch.setattr(tokens_kernel, "state_tiling", lambda *_: tiling)
    monkeypatch.setattr(delta_kernel, "ONE_CHUNK", False)
    case = delta(VERIFY, QWEN, False, torch.bfloat16)
    checked(gated_delta, oracle.gated_delta, case, StateRows.of(VERIFY, CUDA), LIMITS[torch.bfloat16], 2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [QWEN, OLMO, ((2, 4), (64, 64)), ((2, 2), (16, 16))])
@pytest.mark.parametrize(
    "tiling",
    [ShortTiling(16, 32, (3, 3), 4), ShortTiling(32, 32, (5, 4), 2), ShortTiling(32, 32, (2, 2), 2),
     ShortTiling(32, 16, (4, 4), 2), ShortTiling(64, 32, (2, 1), 4)],
)  # fmt: skip
@pytest.mark.parametrize("rows", [VERIFY, [row for row in VERIFY if row[0] <= 5]], ids=["16 tokens", "8"])
def test_delta_as_one_chunk_of_every_tiling(
    rows: Any, tiling: ShortTiling, shape: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = {"piece": min(tiling.piece, shape[1][0])}
    monkeypatch.setattr(delta_kernel, "short_tiling", lambda *_: replace(tiling, **widths))
    checked(gated_delta, oracle.gated_delta, delta(rows, shape, False, dtype), StateRows.of(rows, CUDA),
            LIMITS[dtype], 2e-6)  # fmt: skip


@pytest.mark.parametrize("vector", [False, True])
def test_delta_of_rows_that_replay_much(vector: bool) -> None:
    """Up to 16 tokens with the replayed ones, and more: of one kernel each, in one call."""
    lengths = [(9, 1, 12, 7, 1), (10, 2, 12, 7, 1), (16, 3, 4, 0, 16), (17, 4, 0, 0, 17), (3, 5, 5, 2, 1)]
    torch.manual_seed(0)
    case = on_gpu(delta_case(58, *QWEN, vector, torch.float32, ring_size=21))
    checked(gated_delta, oracle.gated_delta, case, StateRows.of(lengths, CUDA), 1e-5, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_state_stays_accurate_over_many_rounds(dtype: torch.dtype) -> None:
    """500 rounds of gates near 0 and keys that repeat: rounding that has a direction would add up."""
    torch.manual_seed(0)
    names, start, replay = ("q", "k", "v", "g", "beta"), 9, 0
    ours = on_gpu(delta_case(4, (1, 2), (128, 128), False, dtype, slots=2, ring_size=RING))
    right = apart(ours)
    right["state"] = right["state"].double()
    for turn in range(500):
        tokens = on_gpu(delta_case(4, (1, 2), (128, 128), False, dtype, slots=2, ring_size=RING))
        tokens["g"] *= 1e-3
        if turn % 3 == 0:
            tokens["k"][1:] = tokens["k"][:1]
        new, rows = {n: tokens[n] for n in names}, StateRows.of([(4, 1, start, replay, 1)], CUDA)
        out, expected = gated_delta(**ours | new, rows=rows), oracle.gated_delta(**right | new, rows=rows)
        close(out, expected, 1e-5 if dtype == torch.float32 else LIMITS[dtype])
        replay = int(torch.randint(0, 4, ()))
        start += 1 + replay
    close(ours["state"][1], right["state"][1], 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "vector"), [(QWEN, False), (KIMI, True), (OLMO, False)])
def test_delta_of_prompts(shape: Any, vector: bool, dtype: torch.dtype) -> None:
    """In TF32 where the inputs are bfloat16."""
    case = delta(LONG, shape, vector, dtype)
    limits = (1e-5, 1e-5) if dtype == torch.float32 else (6e-3, 4e-3)
    checked(gated_delta, oracle.gated_delta, case, StateRows.of(LONG, CUDA), *limits)


@pytest.mark.parametrize("one_chunk", [False, True])
def test_replayed_tokens_change_the_state_by_the_same_bits(one_chunk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds in which drafts are accepted and rejected, and one token a round: the same outputs, to the bit token by
    token, within what bfloat16 rounds where a round is one chunk."""
    monkeypatch.setattr(delta_kernel, "ONE_CHUNK", one_chunk)
    accepted, total, shape = [0, 3, 1, 2, 3, 0, 2], 18, QWEN
    case = delta([(total, 1, 0, 0, total)], shape, False, torch.bfloat16)
    names = ("q", "k", "v", "g", "beta")

    def launch(kept: dict[str, Any], tokens: dict[str, Any], row: Any) -> torch.Tensor:
        return gated_delta(**kept | tokens, rows=StateRows.of([row], CUDA))

    one = apart(case)
    singles = [launch(one, {n: case[n][t : t + 1] for n in names}, (1, 1, t, 0, 1)) for t in range(total)]
    ours, start, replay, outs = apart(case), 0, 0, []
    for count in accepted:
        tokens = {n: case[n][start : start + 1 + K].clone() for n in names}
        for x in tokens.values():
            x[count + 1 :] = 0.7  # rejected drafts
        outs.append(launch(ours, tokens, (len(tokens["q"]), 1, start, replay, 1))[: count + 1])
        start, replay = start + 1 + count, count
    got, right = torch.cat(outs), torch.cat(singles)[:start]
    if one_chunk:
        close(got, right, LIMITS[torch.bfloat16])
    else:
        assert torch.equal(got, right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["delta", "vector gates", "mamba2", "mamba1", "conv"])
def test_in_order_a_row_has_the_same_bits_however_it_is_cut_and_beside_others(kind: str, dtype: torch.dtype) -> None:
    """Read at once; in pieces beside 40 rows; with drafts, some of them rejected; from other sizes of rings."""
    torch.manual_seed(0)
    names_of_delta = ("q", "k", "v", "g", "beta")
    makers: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
        "delta": (gated_delta, lambda **o: delta_case(700, *QWEN, False, dtype, **o), names_of_delta),
        "vector gates": (gated_delta, lambda **o: delta_case(700, *KIMI, True, dtype, **o), names_of_delta),
        "mamba2": (ssd_scan, lambda **o: ssd_case(700, (1, 32), (64, 128), dtype, **o), ("x", "dt", "B", "C")),
        "mamba1": (selective_scan, lambda **o: scan_case(700, 1024, 16, dtype, **o), ("x", "dt", "B", "C")),
        "conv": (short_conv, lambda **o: conv_case(700, 1024, 4, dtype, **o), ("x",)),
    }
    function, make, names = makers[kind]
    in_order = {"in_order": True} if kind in ("delta", "vector gates", "mamba2") else {}
    sizes = {"slots": 45} | ({} if kind == "conv" else {"ring_size": RING})
    case = on_gpu(make(**sizes)) | in_order
    others = range(3, 43)
    row = {n: case[n][:600] for n in names}
    whole = function(**apart(case) | row, rows=StateRows.of([(600, 1, 0, 0, 600)], CUDA))
    ours, outs, start, replay = apart(case), [], 0, 0
    for new, drafts, accepted in ((64, 0, 0), (1, 0, 0), (500, 0, 0), (1, 3, 2), (1, 3, 0), (1, 3, 3), (1, 3, 1)):
        own = {n: x[start : start + new + drafts].clone() for n, x in row.items()}
        for x in own.values():
            x[new + accepted :] = 0.3
        given = {n: torch.cat([own[n], *(case[n][s : s + 2] for s in others)]) for n in names}
        lengths = [(new + drafts, 2, start, replay, new), *((2, s, 0, 0, 2) for s in others)]
        outs.append(function(**ours | given, rows=StateRows.of(lengths, CUDA))[: new + accepted])
        start, replay = start + new + accepted, accepted
    assert torch.equal(torch.cat(outs), whole[:start])


def test_a_captured_round_follows_its_lengths() -> None:
    """Nothing is read on the host: one graph for all lengths, slots and replays, of the four recurrences."""
    torch.manual_seed(0)
    kinds = [
        (
            gated_delta,
            oracle.gated_delta,
            on_gpu(delta_case(16, (2, 4), (64, 64), False, torch.bfloat16, ring_size=RING)),
        ),
        (ssd_scan, oracle.ssd_scan, on_gpu(ssd_case(16, (2, 4), (64, 64), torch.bfloat16, ring_size=RING))),
        (selective_scan, oracle.selective_scan, on_gpu(scan_case(16, 96, 16, torch.bfloat16, ring_size=RING))),
        (short_conv, oracle.short_conv, on_gpu(conv_case(16, 96, 5, torch.bfloat16))),
    ]
    first = [(4, 1, 8, 3, 1), (4, 2, 5, 0, 1), (4, 3, 12, 1, 1), (4, 0, 0, 0, 1)]
    others = [(4, 5, 21, 2, 1), (4, 1, 10, 1, 1), (4, 4, 3, 3, 1), (4, 2, 6, 0, 1)]
    for kernel, rule, case in kinds:
        rows = StateRows.of(first, CUDA)
        kernel(**apart(case), rows=rows)
        ours = apart(case)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kernel(**ours, rows=rows)
        right = apart(case)
        for lengths in (first, others):
            new = StateRows.of(lengths, CUDA)
            for name in ("slots", "start", "replay", "num_new"):
                getattr(rows, name).copy_(getattr(new, name))
            graph.replay()
            expected = rule(**right, rows=new)
            close(out[:12], expected[:12], 4e-3)
            same_rings(ours["ring"], right["ring"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "dims"), [((8, 128), (128, 64)), ((1, 24), (256, 64)), ((2, 6), (16, 80)), ((2, 8), (6, 8))]
)
def test_mamba2(heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for lengths, limits in (
        (VERIFY, (LIMITS[dtype], 2e-6)),
        (LONG, (1e-5, 1e-5) if dtype == torch.float32 else (6e-3, 4e-3)),
    ):
        case = on_gpu(ssd_case(sum(r[0] for r in lengths) + 3, heads, dims, dtype, ring_size=RING))
        checked(ssd_scan, oracle.ssd_scan, case, StateRows.of(lengths, CUDA), *limits)


@pytest.mark.parametrize("tiling", [StateTiling(32, 32, 8, 80), StateTiling(64, 32, 8, 80), StateTiling(16, 16, 4)])
def test_mamba2_of_every_tiling(tiling: StateTiling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_kernel, "state_tiling", lambda *_: tiling)
    torch.manual_seed(0)
    case = on_gpu(ssd_case(sum(r[0] for r in VERIFY) + 3, (8, 128), (128, 64), torch.bfloat16, ring_size=RING))
    checked(ssd_scan, oracle.ssd_scan, case, StateRows.of(VERIFY, CUDA), LIMITS[torch.bfloat16], 2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [VERIFY, LONG], ids=["round", "prompts"])
def test_mamba1(lengths: list[Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = on_gpu(scan_case(sum(r[0] for r in lengths) + 3, 1000, 16, dtype, ring_size=RING))
    checked(selective_scan, oracle.selective_scan, case, StateRows.of(lengths, CUDA), LIMITS[dtype], 5e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "taps"), [(8192, 4), (1000, 3), (88, 4)])
@pytest.mark.parametrize("lengths", [VERIFY, LONG], ids=["round", "prompts"])
def test_convolution(lengths: list[Any], channels: int, taps: int, dtype: torch.dtype) -> None:
    """The rule rounds once, the kernel before silu, too, as torch does."""
    torch.manual_seed(0)
    case = on_gpu(conv_case(sum(r[0] for r in lengths) + 3, channels, taps, dtype))
    checked(short_conv, oracle.short_conv, case, StateRows.of(lengths, CUDA), LIMITS[dtype] * 1.5, 0)
