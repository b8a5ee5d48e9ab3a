"""Prompts that begin alike: the time to the first token with the prefix cache and without."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from benchmarks.workload import milliseconds
from specdec import SamplingParams, SpeculativeModel

_WARM = 2
"""Runs that do not count: the first ones capture graphs of their own sizes."""


def seconds_to_first_token(model: SpeculativeModel, prompt: list[int], cached: bool) -> tuple[float, int]:
    """Of one request that is alone, from its call on; and how many of its tokens were not read.

    What the request before it left running on the device ends first: a round is launched before the last one is read.
    """
    params = SamplingParams(max_new_tokens=2 * model.num_speculative_tokens + 3, ignore_eos=True, cache_prefix=cached)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    started, first = time.perf_counter(), 0.0
    for update in model.stream([prompt], params):
        first = first or time.perf_counter() - started
        if update.completion is not None:
            return first, update.completion.stats.cached_tokens
    raise AssertionError("a stream ends with a completion")


def shared_prefix(
    model: SpeculativeModel, prefix: int, own: int, repeats: int, vocab: int, seed: int
) -> dict[str, Any]:
    """Numbers of `repeats` requests with the same first `prefix` tokens and `own` others, each with and without.

    The two kinds take turns, so that both see the same clocks.

    Raises:
        ValueError: the prefix was not found, so that nothing was measured.
    """
    rng = np.random.default_rng(seed)
    common = rng.integers(0, vocab, prefix).tolist()
    kinds: dict[str, list[float]] = {"cached": [], "uncached": []}
    taken: list[int] = []
    for run in range(-_WARM, repeats):
        for name, times in kinds.items():
            prompt = common + rng.integers(0, vocab, own).tolist()
            seconds, tokens = seconds_to_first_token(model, prompt, name == "cached")
            if run >= 0:
                times.append(seconds)
                taken += [tokens] * (name == "cached")
    if min(taken) < prefix - 2 * model.config.page_size:
        raise ValueError(f"of {prefix} tokens only {min(taken)} were found in the prefix cache")
    found: dict[str, Any] = {"prefix": prefix, "own": own, "cached_tokens": min(taken), "repeats": repeats}
    for name, times in kinds.items():
        found |= milliseconds(f"first_token_{name}", np.array(times))
    cached, uncached = (float(np.median(times)) for times in kinds.values())
    return found | {"cached_over_uncached": cached / uncached}
