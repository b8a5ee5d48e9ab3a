"""The uniforms and sampling parameters of a round's rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy import ndarray

from attention.cached import cached_property
from specdec.requests.sampling import SamplingArrays
from specdec.rounds.rows import RowTable
from specdec.rounds.verification import TargetArrays

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio: the increment of splitmix64."""


class Role(IntEnum):
    """The decision that a uniform is used for; TOKEN: the noise of one that is keyed by position."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RESAMPLE = 3


def request_key(seed: int, sample_index: int) -> int:
    """The 64-bit key of a request: its seed and, for several samples of one prompt, the sample's index."""
    seeds = np.array([seed & (2**64 - 1)], np.uint64)
    return int(_mix(_mix(seeds) ^ _mix(np.array([sample_index], np.uint64) + _GOLDEN))[0])


def uniforms(keys: ndarray, positions: ndarray, role: Role) -> ndarray:
    """Uniforms in [0, 1), float32 with 24 random bits.

    Args:
        keys: [...] uint64 request keys.
        positions: [...] int64 position of the token the uniform decides; broadcasts with keys.

    Source: splitmix64 finaliser, Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    """
    # The upper 24 bits: float32 holds them exactly, so no uniform is rounded up to 1.
    return ((position_bits(keys, positions, role) >> np.uint64(40)).astype(np.float32)) * np.float32(2.0**-24)


def position_bits(keys: ndarray, positions: ndarray, role: Role) -> ndarray:
    """64 random bits [...] uint64; for the arguments see `uniforms`."""
    with np.errstate(over="ignore"):
        # Times 4: a position has one counter for each role.
        counter = positions.astype(np.uint64) * np.uint64(4) + np.uint64(role)
        return _mix(keys ^ _mix(counter * _GOLDEN + _GOLDEN))


def noise_seeds(keys: ndarray, positions: ndarray) -> ndarray:
    """Seeds [...] int64 of the noise of requests' tokens, see `specdec.requests.noise`; arguments as of `uniforms`."""
    return position_bits(keys, positions, Role.TOKEN).view(np.int64)


def _mix(x: ndarray) -> ndarray:
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class SamplingRound:
    """A round with sampled rows: parameters, and uniforms by position.

    Draft j+1 is j+1 positions after the bonus token; so is the next token when j drafts were accepted.

    Attributes:
        arrays: [B] sampling parameters. keys: [B] uint64.
        first: [B] int64, position of the token after the committed ones.
        num_decided: J, the first rows, whose token is decided; num_drafting: R, the first of those, which have drafts.
        max_drafts: n.
    """

    arrays: SamplingArrays
    keys: ndarray
    first: ndarray
    num_decided: int
    num_drafting: int
    max_drafts: int

    @cached_property
    def decided(self) -> SamplingRound:
        """The first J rows."""
        own = slice(0, self.num_decided)
        return replace(self, arrays=self.arrays.rows(own), keys=self.keys[own], first=self.first[own])

    def draft_uniforms(self) -> ndarray:
        """[R, n] float32, of the drafts that this round verifies."""
        return self._uniforms(np.arange(self.max_drafts), Role.DRAFT)[: self.num_drafting]

    def accept_uniforms(self, num_drafts: int) -> ndarray:
        """[B, num_drafts] float32, of acceptance."""
        return self._uniforms(np.arange(num_drafts), Role.ACCEPT)

    def next_uniforms(self, places: int) -> ndarray:
        """[B, places] float32, of the token after the accepted drafts, for each of the n+1 places where it may be."""
        return self._uniforms(np.arange(places), Role.RESAMPLE)

    def ahead_uniforms(self, places: int) -> ndarray:
        """[B, places] float32, for the drafts after this round: with a accepted drafts, draft j+1 has column a+j < 2K.

        Example: 1 of K=2 drafts is accepted. The next bonus token is at first+1, draft 1 at first+2, which is column 1.
        """
        return self._uniforms(np.arange(1, places + 1), Role.DRAFT)

    def seeds(self, places: int) -> ndarray:
        """[B, places] int64: the noise of the token at each position from `first` on, and of a draft of it."""
        return noise_seeds(self.keys[:, None], self.first[:, None] + np.arange(places))

    def _uniforms(self, offsets: ndarray, role: Role) -> ndarray:
        return uniforms(self.keys[:, None], self.first[:, None] + offsets, role)


def sampling_round(target: TargetArrays, rows: ndarray, table: RowTable) -> SamplingRound:
    """Of a verification of these RowTable rows [B], of which some are sampled."""
    return SamplingRound(
        arrays=table.sampling(rows),
        keys=table.key[rows],
        first=target.start + target.num_new,
        num_decided=len(target.decided),
        num_drafting=target.num_drafting,
        max_drafts=target.max_drafts,
    )
