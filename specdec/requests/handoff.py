"""`Handoff`: a request on its way from the engine that read its prompt to the one that goes on, as plain bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from attention.cache.handoff import VERSION, EngineTable
from attention.errors import HandoffMismatchError
from specdec.requests.moved import MovedRequest
from specdec.requests.request import Completion
from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import RequestStats
from specdec.values import real, refuse, refuse_type, whole

_MAGIC = b"specdec handoff\n"
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.int64, torch.float32, torch.float16, torch.bfloat16)}
_LONGEST_HEADER = 2**28
_COUNTS = ("limit", "num_drafts", "sample_index", "preemptions", "prefix_hit_tokens", "cached_tokens")


@dataclass(frozen=True)
class Handoff:
    """A request whose prompt was read by one SpeculativeModel (`prefill`), to be continued by another (`resume`).

    It holds no keys and values: those stay in the pages of the first engine, which holds them for this request until it
    was read or its lease is over. It may be sent anywhere (`to_bytes`); whoever has it can read these pages.

    Attributes:
        source: where the pages are, and what they were made with. lease: the right to read them; expires: until when,
            in `time.time` seconds of the source's clock.
        moved: the request. blocks: its pages by cache group.
        tensors: drafts for its next verification and what they were drawn from, states of recurrent layers: see
            `specdec.requests.moved.Departure`. On the host.
        completion: set when the request ended with its first token, and nothing is left to be done.
    """

    source: EngineTable
    lease: str
    expires: float
    moved: MovedRequest | None
    blocks: Mapping[str, tuple[int, ...]]
    tensors: Mapping[str, torch.Tensor]
    completion: Completion | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        """What was read."""
        if self.completion is not None:
            return self.completion.prompt_token_ids
        assert self.moved is not None
        return list(self.moved.prompt_token_ids)

    @property
    def token_ids(self) -> list[int]:
        """New tokens so far."""
        if self.completion is not None:
            return self.completion.token_ids
        assert self.moved is not None
        return list(self.moved.new_token_ids)

    def to_bytes(self) -> bytes:
        """For another process or host: a line, the length of a JSON header, the header, the tensors' bytes."""
        header = {
            "version": VERSION,
            "source": self.source.to_json(),
            "lease": self.lease,
            "expires": self.expires,
            "moved": None if self.moved is None else asdict(self.moved),
            "blocks": {group: list(own) for group, own in self.blocks.items()},
            "completion": None if self.completion is None else asdict(self.completion),
            "tensors": [[name, _name_of(t.dtype), list(t.shape)] for name, t in self.tensors.items()],
        }
        text = json.dumps(header).encode()
        parts = [t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in self.tensors.values()]
        return b"".join([_MAGIC, len(text).to_bytes(8, "little"), text, *parts])

    @classmethod
    def from_bytes(cls, data: bytes) -> Handoff:
        """The inverse of `to_bytes`; no code of the data is run.

        Raises:
            HandoffMismatchError: another version, or no handoff. InvalidInputError: no bytes.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise refuse_type("a handoff", data, "the bytes of Handoff.to_bytes")
        data, start = bytes(data), len(_MAGIC) + 8
        size = int.from_bytes(data[len(_MAGIC) : start], "little")
        if data[: len(_MAGIC)] != _MAGIC or not 0 < size <= min(len(data) - start, _LONGEST_HEADER):
            raise HandoffMismatchError(
                f"{len(data)} bytes that begin with {data[:16]!r} are no handoff, or only a part"
            )
        try:
            header = json.loads(data[start : start + size])
            if header["version"] != VERSION:
                raise HandoffMismatchError(
                    f"a handoff of version {header['version']!r}; this installation reads version {VERSION}"
                )
            return cls(
                source=EngineTable.from_json(header["source"]),
                lease=_text("lease", header["lease"]),
                expires=_seconds("expires", header["expires"]),
                moved=None if header["moved"] is None else _moved(header["moved"]),
                blocks={str(group): _numbers(f"blocks of {group}", own) for group, own in header["blocks"].items()},
                tensors=_tensors(header["tensors"], data[start + size :]),
                completion=None if header["completion"] is None else _completion(header["completion"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, HandoffMismatchError):
                raise
            raise HandoffMismatchError(f"this is no handoff: {type(error).__name__}: {error}") from error


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _moved(given: dict[str, Any]) -> MovedRequest:
    """Every value by its kind: one of another ends a round there, and with it other requests."""
    read: dict[str, Any] = {"params": SamplingParams.from_dict(given["params"])}
    read |= {name: _numbers(name, given[name]) for name in ("prompt_token_ids", "new_token_ids", "eos_token_ids")}
    read |= {name: whole(name, given[name], 0) for name in _COUNTS}
    read |= {name: _seconds(name, given[name]) for name in ("queue_s", "prefill_s")}
    read |= {"key": whole("key", given["key"], 0, 2**64 - 1), "variant": whole("variant", given["variant"], 0, 2**31)}
    if given.keys() != read.keys():
        raise ValueError(f"a request of other fields: {sorted(given.keys() ^ read.keys())}")
    return MovedRequest(**read)


def _numbers(name: str, given: Any) -> tuple[int, ...]:
    """Token ids or page numbers."""
    if not isinstance(given, list):
        raise refuse_type(name, given, "a list of numbers")
    return tuple(whole(name, number, 0) for number in given)


def _seconds(name: str, given: Any) -> float:
    found = real(name, given, "seconds")
    if not 0 <= found < math.inf:
        raise refuse(name, given, "seconds, from 0 on")
    return found


def _text(name: str, given: Any) -> str:
    if not isinstance(given, str):
        raise refuse_type(name, given, "a text")
    return given


def _completion(given: dict[str, Any]) -> Completion:
    stats = RequestStats(**{**given["stats"], "rounds": ()})  # it ended with the prompt's token: no round
    drafts = None if given["drafts"] is None else ()
    return replace(Completion(**given), stats=stats, drafts=drafts)


def _tensors(given: list[Any], data: bytes) -> dict[str, torch.Tensor]:
    found, at = {}, 0
    for name, dtype, shape in given:
        kind, count = _DTYPES[dtype], math.prod(shape)
        size = count * kind.itemsize
        if count < 0 or at + size > len(data):
            raise ValueError(f"tensor {name} is cut off")
        raw = torch.frombuffer(bytearray(data[at : at + size]), dtype=torch.uint8) if size else torch.empty(0)
        found[str(name)] = raw.view(kind).view(shape) if size else torch.empty(shape, dtype=kind)
        at += size
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes more than its tensors have")
    return found
