"""What tests let every rank run (`LeadingEngine.run`): planted defects, most of them on rank 1 alone."""

from __future__ import annotations

import functools
from typing import Any

import torch

import specdec.loading.targets
import specdec.parallel.ranks


def nothing(engine: Any) -> int:
    return engine.ranks.rank


def wrong_drafts(engine: Any) -> None:
    """Rank 1 drafts other ids from now on, which no head ever drafts."""
    if engine.ranks.rank == 0:
        return
    loop = engine.executor.drafter.loop
    run = type(loop).run

    def wrong(*args: Any) -> Any:
        draft = run(loop, *args)
        draft.token_ids.zero_()
        return draft

    object.__setattr__(loop, "run", wrong)


def right_drafts(engine: Any) -> None:
    vars(engine.executor.drafter.loop).pop("run", None)


def never_share(engine: Any) -> None:
    """No rank takes over rank 0's drafts: what `Ranks.share` is for, left out."""
    share = specdec.parallel.ranks.Ranks.share

    def not_drafts(self: Any, ids: torch.Tensor) -> None:
        if ids.shape[1] > engine.config.num_speculative_tokens:
            share(self, ids)

    engine.ranks.share = functools.partial(not_drafts, engine.ranks)


def share_again(engine: Any) -> None:
    vars(engine.ranks).pop("share", None)


def broken_loading(engine: Any) -> None:
    """The next load fails on rank 1, after its weights are read."""
    if engine.ranks.rank == 0:
        return
    take_share = specdec.loading.targets.take_share

    def fail(*args: Any) -> None:
        specdec.loading.targets.take_share = take_share
        raise OSError("planted")

    specdec.loading.targets.take_share = fail


def one_more_request(engine: Any) -> None:
    """Rank 1 has a request that nobody else has."""
    if engine.ranks.rank == 1:
        from specdec.engine.engine import Engine
        from specdec.requests.sampling import SamplingParams

        Engine.submit(engine, [5, 6, 7], SamplingParams(max_new_tokens=8))


@torch.no_grad()
def compiled_error(engine: Any) -> float:
    """The largest difference of logits between the share as one compiled graph, for any length, and as it is."""
    model = engine.target.hf_model
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    errors = []
    for count in (5, 9):
        ids = torch.arange(3, 3 + count)[None]
        errors.append(float((compiled(ids, use_cache=False).logits - model(ids, use_cache=False).logits).abs().max()))
    return max(errors)


def wrong_results(engine: Any) -> None:
    """Rank 1 accepts nothing and decides another token from now on."""
    if engine.ranks.rank == 0:
        return
    judge = engine.executor.judge

    def wrong(*args: Any) -> Any:
        result = judge(*args)
        result.num_accepted.zero_()
        result.tokens.fill_(7)
        return result

    engine.executor.judge = wrong


def right_results(engine: Any) -> None:
    vars(engine.executor).pop("judge", None)
