"""Pairs by expert in Triton's interpreter: by one program, and by many with tiles."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("tests/gpu runs the kernels compiled", allow_module_level=True)

from triton.runtime._async_compile import active_mode

from specdec.ops.mixtures import grouping_kernel
from specdec.ops.mixtures.grouping_kernel import Groups, group_pairs


def tiles_of(groups: Groups) -> list[tuple[int, int]]:
    """Expert and first place of each."""
    assert groups.tiles is not None and groups.num_tiles is not None
    return [(int(expert), int(first)) for expert, first in groups.tiles.T[: int(groups.num_tiles)]]


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.thorough
def test_groups(data: st.DataObject) -> None:
    """Every pair stands once, among those of its expert; tiles are all of them, from the first place on."""
    experts = data.draw(st.integers(1, 40))
    tokens, chosen = data.draw(st.integers(2, 20)), data.draw(st.integers(1, 5))
    ids = data.draw(
        st.lists(st.integers(0, experts - 1), min_size=tokens * chosen, max_size=tokens * chosen), label="experts"
    )
    tiled, size = data.draw(st.booleans()), data.draw(st.sampled_from([2, 8, 128]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouping_kernel, "TILE", size)
        patch.setattr(grouping_kernel, "_PAIRS", 16)
        groups = group_pairs(torch.tensor(ids).view(tokens, chosen), experts, tiled=tiled)
    offsets = groups.offsets.tolist()
    assert sorted(groups.order.tolist()) == list(range(len(ids))) and offsets[-1] == len(ids)
    for expert in range(experts):
        own = groups.order[offsets[expert] : offsets[expert + 1]].tolist()
        assert sorted(own) == [pair for pair, chosen_by in enumerate(ids) if chosen_by == expert]
    active = [expert for expert in groups.active.tolist() if expert >= 0]
    assert active == sorted(set(ids))
    if tiled:
        expected = [(e, first) for e in range(experts) for first in range(offsets[e], offsets[e + 1], size)]
        assert tiles_of(groups) == expected
        assert groups.tiles is not None and groups.tiles.shape[1] >= len(expected)
    else:
        assert groups.tiles is None


@pytest.mark.parametrize("tiled", [False, True])
def test_what_a_rehearsal_finds_is_no_place(tiled: bool) -> None:
    """Numbers that are no expert's, as in memory that nothing was written to, are in no group."""
    index = torch.tensor([[3, 7], [-1, 2], [2**40, 3], [0, 5]])
    groups = group_pairs(index, 5, tiled=tiled)
    assert groups.offsets.tolist() == [0, 1, 1, 2, 4, 4] and sorted(groups.order[:4].tolist()) == [0, 3, 5, 6]
    assert groups.active.tolist() == [0, 2, 3, -1, -1]
    assert not tiled or tiles_of(groups) == [(0, 0), (2, 1), (3, 2)]


@pytest.mark.parametrize("tiled", [False, True])
def test_padding_takes_the_experts_of_the_first_token(tiled: bool) -> None:
    index = torch.tensor([[0, 4], [2, 3], [5, 6], [1, 4]])
    groups = group_pairs(index, 7, (torch.tensor([40, 41, 3, 16]), 16), tiled)
    assert [expert for expert in groups.active.tolist() if expert >= 0] == [0, 1, 2, 3, 4]
    offsets = groups.offsets.tolist()
    assert sorted(groups.order[offsets[4] : offsets[5]].tolist()) == [1, 5, 7]


def test_places_are_never_left_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a rehearsal, which skips kernels that are not compiled yet: see `attention.kernels.launch`."""
    seen = list[object]()

    class Noted:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            seen.append(active_mode.get())
            return self._kernel[grid]

    for name in ("_group_kernel", "_rank_kernel", "_place_kernel"):
        monkeypatch.setattr(grouping_kernel, name, Noted(getattr(grouping_kernel, name)))
    before = active_mode.set(object())  # type: ignore[arg-type]
    try:
        for tiled in (False, True):
            group_pairs(torch.tensor([[0, 1], [1, 2]]), 3, tiled=tiled)
    finally:
        active_mode.reset(before)
    assert seen == [None] * 3


def test_many_pairs_have_tiles() -> None:
    assert group_pairs(torch.zeros(2049, 2, dtype=torch.int64), 3).tiles is not None
    assert group_pairs(torch.zeros(2048, 2, dtype=torch.int64), 3).tiles is None
