"""Sampled rows of rounds from graphs: their kernels' torch reference for a CPU, and defects to plant in their rounds.

Triton's interpreter runs those kernels on a CPU too (tests/specdec/ops/test_filters.py compares them with the functions
that are called here), but needs a tenth of a second for a row and round; a distribution needs thousands of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import specdec.execution.sampled as sampled
from drafters.oracle import ChooseDraft, most_probable
from specdec.acceptance.accept import SampledInputs, accept_sampled
from specdec.acceptance.packed import PackedResult
from specdec.ops.draws import Filtered, Proposal, accept_drafts, draw_drafts, filter_rows
from specdec.requests.sampling import SamplingArrays, SamplingParams, SamplingTensors
from specdec.requests.target_probs import draw, target_probs
from specdec.rounds.randomness import Role, request_key, uniforms


def reference_filters(
    logits: torch.Tensor,
    peaks: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    stats: torch.Tensor,
    index: torch.Tensor | None,
    copy: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
) -> None:
    """`launch_filters` in torch."""
    rows = len(stats)
    sampling = SamplingTensors(*(p.repeat_interleave(rows // len(p)) for p in parameters), filters=True)
    x = (logits if index is None else logits[index]).float()
    kept = target_probs(x, sampling) > 0
    peak = x.gather(1, (peaks if index is None else peaks[index])[:, None])
    threshold = x.masked_fill(~kept, torch.inf).amin(1, keepdim=True)
    first = (kept & (x == threshold)).int().argmax(1, keepdim=True).float()
    temperature = torch.where(sampling.temperature == 0, 1.0, sampling.temperature)[:, None]
    total = ((x - peak) / temperature).exp().masked_fill(~kept, 0.0).sum(1, keepdim=True)
    is_sampled = sampling.temperature[:, None] > 0
    stats.copy_(torch.where(is_sampled, torch.cat([peak, threshold, first, total], 1), stats))
    if copy is not None:
        copy.copy_(torch.where(is_sampled, logits, copy))
    if zeros is not None:
        zeros.zero_()


def reference_drafts(
    logits: torch.Tensor,
    ids: torch.Tensor,
    parameters: tuple[torch.Tensor, ...],
    uniform: torch.Tensor,
    step: int,
    stats: torch.Tensor,
    num_accepted: torch.Tensor | None,
    places: tuple[torch.Tensor | None, ...] = (None, None, None, None),
) -> None:
    """`launch_drafts` in torch."""
    copy, drafts, target_ids, kept_accepted = places
    reference_filters(logits, ids, parameters, stats, None, copy)
    temperature, min_p = parameters[0], parameters[3]
    is_sampled = temperature > 0
    q = Filtered(stats).probs(logits, torch.where(is_sampled, temperature, 1.0), min_p)
    accepted = torch.zeros_like(ids)
    if num_accepted is not None:  # of the rows that are there; padding rows are greedy
        accepted[: len(num_accepted)] = num_accepted[: len(ids)]
    at = step + accepted
    own = uniform.gather(1, at.clamp(max=uniform.shape[1] - 1)[:, None])[:, 0]
    weights = torch.where(is_sampled[:, None], q, 1.0)  # the stats of greedy rows are undefined
    ids.copy_(torch.where(is_sampled, draw(weights, own), ids))
    if drafts is not None:
        drafts.copy_(torch.where(is_sampled, ids if target_ids is None else target_ids[ids], drafts))
    if kept_accepted is not None:
        kept_accepted[: len(ids)] = torch.where(is_sampled, accepted, kept_accepted[: len(ids)])


def reference_acceptance(
    logits: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    accept_uniform: torch.Tensor,
    next_uniform: torch.Tensor,
    packed: torch.Tensor,
    proposal: tuple[torch.Tensor, ...] | None,
) -> None:
    """`launch_acceptance` in torch."""
    index, stats, temperature, min_p, num_drafts = inputs
    (rows, width), n = index.shape, index.shape[1] - 1
    is_sampled = temperature > 0
    temperature = torch.where(is_sampled, temperature, 1.0)

    def probs(filtered: torch.Tensor, x: torch.Tensor, each: int) -> torch.Tensor:
        found = Filtered(filtered).probs(x, temperature.repeat_interleave(each), min_p.repeat_interleave(each))
        return torch.where(is_sampled.repeat_interleave(each)[:, None], found, 1.0).view(rows, each, -1)

    p = probs(stats, logits[index.reshape(-1)], width)
    result, q = PackedResult(packed), None
    drafts = result.drafts.clone()
    if proposal is not None and n:
        head_logits, head_stats, inverse, sources = proposal
        own = sources.clamp(min=0)
        of_head = probs(head_stats[own, :n].flatten(0, 1), head_logits[own, :n].flatten(0, 1), n)
        q = of_head[..., inverse.clamp(min=0).long()] * (inverse >= 0)
        one_hot = torch.nn.functional.one_hot(drafts, p.shape[2]).float()
        q = torch.where((sources >= 0)[:, None, None], q, one_hot)
    own_uniforms = accept_uniform[:rows, :n], next_uniform[:rows, :width]
    found = accept_sampled(drafts, num_drafts, SampledInputs(p, q, *own_uniforms))
    again = PackedResult.pack(found.num_accepted, found.next_token, drafts).packed
    packed.copy_(torch.where(is_sampled[:, None], again, packed))


@contextmanager
def kernels_by_reference() -> Iterator[None]:
    """Inside, what decides and drafts sampled rows is computed by torch."""
    filters, draws = "specdec.ops.filters_kernel", "specdec.ops.draws_kernel"
    import_module(draws)  # before the patches: it would keep the reference's filters when they are gone
    with (
        patch(f"{filters}.launch_filters", reference_filters),
        patch(f"{draws}.launch_drafts", reference_drafts),
        patch(f"{draws}.launch_acceptance", reference_acceptance),
    ):
        yield


def drawn_as(params: SamplingParams) -> ChooseDraft:
    """How the draft oracle chooses the drafts of a request that is drafted for from the head's distribution.

    Written from the contract: the uniform of a draft is that of (seed, sample 0, its position, role DRAFT).
    """
    if params.greedy:
        return most_probable
    assert params.seed is not None
    keys = np.array([request_key(params.seed, 0)], np.uint64)
    own = SamplingArrays.of([params])
    parts = (own.temperature, own.top_k, own.top_p, own.min_p)
    sampling = SamplingTensors(*(torch.from_numpy(part) for part in parts), filters=True)

    def choose(position: int, logits: torch.Tensor) -> torch.Tensor:
        uniform = uniforms(keys, np.array([position]), Role.DRAFT)
        return draw(target_probs(logits, sampling), torch.from_numpy(uniform))

    return choose


def uniform_of_the_acceptance_again(
    logits: Any, index: Any, filtered: Any, sampling: Any, num: Any, accept: Any, following: Any, *rest: Any
) -> None:
    """The token after a rejection is drawn with the uniform that rejected the draft."""
    n = index.shape[1] - 1
    again = torch.cat([accept[: len(index), :n], following[: len(index), n:]], 1)
    accept_drafts(logits, index, filtered, sampling, num, accept, again, *rest)


def q_of_the_draft_before(*args: Any) -> None:
    """Draft j+1 is judged by the q of draft j."""
    *others, proposal = args
    if proposal is not None:
        steps = torch.arange(proposal.logits.shape[1], device=proposal.logits.device).sub(1).clamp(min=0)
        stats = Filtered(proposal.filtered.stats.index_select(1, steps))
        proposal = Proposal(proposal.logits.index_select(1, steps), stats, proposal.inverse, proposal.sources)
    accept_drafts(*others, proposal)


def residual_without_q(*args: Any) -> None:
    """The token after a rejection comes from p: that is what is drawn where all drafts there are were accepted."""
    logits, index, filtered, sampling, _num, accept, following, packed, *rest = args
    accept_drafts(*args)
    accepted = PackedResult(packed).num_accepted.clone()
    accept_drafts(logits, index, filtered, sampling, accepted, accept, following, packed, *rest)


def temperature_twice(
    logits: Any, ids: Any, sampling: SamplingTensors, uniform: Any, step: int, out: Filtered, **rest: Any
) -> None:
    """Drafts are drawn from the head's logits divided by the temperature twice, and judged as if by it once."""
    greedy = ids.clone()
    squared = replace(sampling, temperature=sampling.temperature * sampling.temperature)
    draw_drafts(logits, ids, squared, uniform, step, out, **rest)
    filter_rows(logits, greedy, sampling, out)


def one_token_less(logits: Any, peaks: Any, sampling: Any, out: Filtered, *, index: Any = None) -> None:
    """The filters of the target leave out the least probable token that they should keep."""
    filter_rows(logits, peaks, sampling, out, index=index)
    x = (logits if index is None else logits.index_select(0, index)).float()
    peak, threshold, first, total = (column[:, None] for column in out.stats.unbind(1))
    of_row = sampling.temperature.repeat_interleave(len(x) // len(sampling.temperature))[:, None]
    column = torch.arange(x.shape[1], device=x.device)
    lowest = (x == threshold) & (column >= first)  # kept; the kernel's first is 0 where no token is left out of them
    tied = lowest & (column > lowest.int().argmax(1, keepdim=True))  # dropped after the first
    above = x.masked_fill(x <= threshold, torch.inf).amin(1, keepdim=True)
    has_more, has_tied = above < torch.inf, tied.any(1, keepdim=True)
    weight = ((threshold - peak) / torch.where(of_row > 0, of_row, 1.0)).exp()
    less = torch.cat(
        [
            peak,
            torch.where(has_tied, threshold, above),
            torch.where(has_tied, tied.int().argmax(1, keepdim=True).float(), 0.0),
            total - weight,
        ],
        1,
    )
    out.stats.copy_(torch.where((of_row > 0) & (has_more | has_tied), less, out.stats))


DEFECTS: dict[str, tuple[str, Callable[..., None]]] = {
    "uniform of the acceptance again": ("accept_drafts", uniform_of_the_acceptance_again),
    "q of the draft before": ("accept_drafts", q_of_the_draft_before),
    "temperature twice in the draft": ("draw_drafts", temperature_twice),
    "top-p one token short": ("filter_rows", one_token_less),
    "residual without q": ("accept_drafts", residual_without_q),
}
"""What sampled rounds can have wrong: the operator of `specdec.execution.sampled` that is replaced, and by what."""
OF_Q = ("q of the draft before", "temperature twice in the draft")
"""Those that only drafts drawn from the head's distribution can have."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Inside, rounds from graphs that are captured have this defect; "" is none."""
    if not name:
        yield
        return
    operator, defect = DEFECTS[name]
    with patch.object(sampled, operator, defect):
        yield
