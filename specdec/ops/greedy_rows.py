"""Greedy rows on a GPU: the arg max of every row of logits, drafts put into a verification, and their acceptance.

`place_drafts` and `accept_greedily` read the drafts where the draft loop keeps them, in the order of the round before.
In torch: `fill_drafts` and `judge_greedy` of `specdec/acceptance/judge.py`, a dozen launches. Tensors on CUDA only.
"""

from __future__ import annotations

import torch

from attention.hf.custom_op import opaque_operator

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@opaque_operator(lambda logits: logits.new_empty(logits.shape[0], dtype=torch.int64))
def greedy_ids(logits: torch.Tensor) -> torch.Tensor:
    """logits [T, V] -> [T] int64, as `argmax(-1)`: the first of equal ones (on CUDA a NaN counts as infinity)."""
    if logits.is_cuda and _has_kernel(logits):
        from attention.kernels.launch import CompiledAtOnce
        from specdec.ops.greedy_kernel import launch_greedy

        with CompiledAtOnce():  # tokens are indices
            return launch_greedy(logits)
    return logits.argmax(-1)


def greedy_drafts(logits: torch.Tensor, target_ids: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Like `greedy_ids`; out [T] int64 of any stride gets their target ids (target_ids [V] int64; None: the same ids).

    The same kernels write both. Not for compiled code, which would not know that `out` is written.
    """
    if _has_kernel(logits):
        from attention.kernels.launch import CompiledAtOnce
        from specdec.ops.greedy_kernel import launch_greedy

        with CompiledAtOnce():  # tokens are indices
            return launch_greedy(logits, target_ids, out)
    ids = greedy_ids(logits)
    out.copy_(ids if target_ids is None else target_ids[ids])
    return ids


def _has_kernel(logits: torch.Tensor) -> bool:
    return logits.is_cuda and logits.dtype in _DTYPES and bool(logits.shape[0]) and logits.stride(1) == 1


def place_drafts(
    token_ids: torch.Tensor,
    places: torch.Tensor,
    flat: torch.Tensor,
    width: int,
    drafts: torch.Tensor,
    sources: torch.Tensor,
) -> None:
    """token_ids[places[i]] = drafts[sources[flat[i] // width], flat[i] % width], in place.

    token_ids: [T]; places, flat: [N] int64, contiguous; each flat[i] is below R·width. width: n, drafts of a row at
    most, at least 1 where N is not 0. drafts: [S, n or more] int64, columns side by side; sources: [R] int64,
    contiguous, its rows.
    """
    if not len(places):
        return
    from specdec.ops.greedy_kernel import launch_placing

    launch_placing(token_ids, places, flat, width, drafts, sources)


def accept_greedily(
    greedy: torch.Tensor,
    index: torch.Tensor,
    num_drafts: torch.Tensor,
    drafts: torch.Tensor,
    sources: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """The longest prefix of every row's drafts that is equal to the target's arg max, then the target's token.

    Args:
        greedy: [T] int64, contiguous: the arg max of each row of logits.
        index: [J, n+1] int64, contiguous: the row of logits after each token of a verification.
        num_drafts: [J] int64, contiguous; drafts past it do not exist.
        drafts: [S, n or more] int64, columns side by side; sources: [R <= J] int64, contiguous: its rows, of the first
            R rows. The others have zeros for drafts.
        out: num_accepted [J], tokens [J, n+1] (drafts with the target's token after the accepted ones, 0 in the last
            place where that is elsewhere) and the drafts [J, n]; int64, columns side by side; written.
    """
    if not len(index):
        return
    from attention.kernels.launch import CompiledAtOnce
    from specdec.ops.greedy_kernel import launch_acceptance

    with CompiledAtOnce():  # the number of accepted drafts is an index into memory
        launch_acceptance(greedy, index, num_drafts, drafts, sources, out)
