"""Counter-based randomness: every uniform is f(seed, request, position, role). No stateful generators.

So the same seed gives the same sampled tokens whatever else is in the batch, and after a preemption: rounds, and with
them the roles by which a position is decided, are the request's own too (`Scheduler.schedule`).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Role(IntEnum):
    """What a uniform is for."""

    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3


def request_key(seed: int, sample_index: int) -> int:
    """The 64-bit key of a request: its seed and, for several samples of one prompt, the sample's index."""
    seeds = np.array([seed & (2**64 - 1)], np.uint64)
    return int(_mix(_mix(seeds) ^ _mix(np.array([sample_index], np.uint64) + _GOLDEN))[0])


def uniforms(keys: np.ndarray, positions: np.ndarray, role: Role) -> np.ndarray:
    """Uniforms in [0, 1), float32 with 24 random bits.

    Args:
        keys: [...] uint64 request keys.
        positions: [...] int64 position of the token the uniform decides; broadcasts with keys.

    Source: splitmix64 finaliser, Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    with np.errstate(over="ignore"):
        counter = positions.astype(np.uint64) * np.uint64(4) + np.uint64(role)
        bits = _mix(keys ^ _mix(counter * _GOLDEN + _GOLDEN))
    return ((bits >> np.uint64(40)).astype(np.float32)) * np.float32(2.0**-24)


def _mix(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
