"""A request between two engines, and the data that moves with it.

`Handoff` holds all of it, and can be sent as plain bytes to another process or host.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention.backends.limits import dtype_name
from attention.errors import HandoffMismatchError, named_error
from attention.transport.region_tables import VERSION, EngineTable
from drafters.checkpoints.tensor_files import StateDict
from specdec.requests.request import Completion, Request, Update
from specdec.requests.sampling import SamplingParams
from specdec.requests.stats import RequestStats
from specdec.requests.submission import Submission
from specdec.values import Json, Options, TokenIds, number, refuse_type, whole

_MAGIC = b"specdec handoff\n"
_DTYPES = {dtype_name(d): d for d in (torch.int64, torch.float32, torch.float16, torch.bfloat16)}
_LONGEST_HEADER = 2**28
_SECONDS = number("seconds, from 0 on", lambda seconds: 0 <= seconds < math.inf)
_COUNTS = ("limit", "num_drafts", "sample_index", "preemptions", "prefix_hit_tokens", "cached_tokens")

Tensors = Mapping[str, Tensor]
Pages = tuple[tuple[int, ...], ...]
"""Pages of one request in each of an engine's pools: the target's groups, the first first, then the head's if any."""


@dataclass(frozen=True)
class MovedRequest:
    """A request whose prompt was read: everything that decides its further tokens, except keys, values and states.

    Attributes:
        prompt_token_ids, new_token_ids: committed tokens. The last new one is the bonus token: every token before it
            has its keys and values in the cache.
        params: as submitted. key: its randomness, the same wherever it runs. num_drafts: K of the request.
        limit: most tokens, prompt and new ones together. sample_index, eos_token_ids, variant: see `Request`.
        queue_s, prefill_s: seconds that it waited, and from then to the first token. Others: see `RequestStats`.
    """

    prompt_token_ids: TokenIds
    new_token_ids: TokenIds
    params: SamplingParams
    key: int
    limit: int
    num_drafts: int
    sample_index: int
    eos_token_ids: TokenIds
    variant: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def of(cls, request: Request) -> MovedRequest:
        """A request that has its first tokens, as another engine needs it."""
        t = request.times
        return cls(
            prompt_token_ids=tuple(request.committed[: request.prompt_len].tolist()),
            new_token_ids=tuple(request.new_tokens),
            queue_s=t.admitted - t.submitted,
            prefill_s=t.first_token - t.admitted,
            **same_fields(request),
        )

    @property
    def committed(self) -> np.ndarray:
        """[n] int32."""
        return np.array(self.prompt_token_ids + self.new_token_ids, np.int32)

    @property
    def computed(self) -> int:
        """Tokens with keys and values: all but the bonus token."""
        return len(self.prompt_token_ids) + len(self.new_token_ids) - 1


def same_fields(own: Request | MovedRequest) -> Options:
    """Fields that a request and its `MovedRequest` have in common, by name."""
    return {name: getattr(own, name) for name in ("params", "key", "eos_token_ids", "variant", *_COUNTS)}


@dataclass(frozen=True)
class Arrival:
    """What a request that waits for a row brings: filled pages, and tensors (see `Departed`)."""

    pages: Pages
    tensors: Tensors

    @property
    def num_drafts(self) -> int:
        """Drafts for its first verification."""
        return len(self.tensors["drafts"]) if "drafts" in self.tensors else 0


@dataclass(frozen=True, kw_only=True)
class Departed(Update):
    """The last update of a request that left its engine with its first token.

    lease: the right to read its `pages` (by pool), which are held until it ends.

    tensors: on the host, what a round in its next engine starts from besides pages, by name: "drafts" [n] int64,
    "draft_probs" [n, Vd] float32 where they were drawn, "carried" of a draft loop that carries something from round to
    round, "state.0", … of recurrent layers.
    """

    moved: MovedRequest
    lease: str
    pages: Pages
    tensors: Tensors

    @property
    def last(self) -> bool:
        return True


@dataclass(frozen=True)
class Leaving(Submission):
    """A request that leaves its engine with its first token. seconds: how long its pages are held then."""

    seconds: float

    def submit_to(self, engine: Any) -> int:
        """Queue it; its id. See `MovingRequests.submit_leaving`."""
        return engine.guests.submit_leaving(self)


@dataclass(frozen=True)
class Resumption:
    """A request from another engine. number: of its filled pages, see `MovingRequests.resume`."""

    handoff: Handoff
    number: int | None

    def submit_to(self, engine: Any) -> int:
        """Queue it; its id. See `MovingRequests.resume`."""
        return engine.guests.resume(self.handoff, self.number)


@dataclass(frozen=True)
class Handoff:
    """A request whose prompt was read by one SpeculativeModel (`prefill`), to be continued by another (`resume`).

    It holds no keys and values: the first engine keeps them in its pages until they were read or the lease has ended.
    It may be sent anywhere (`to_bytes`). It is a credential: with it these pages can be read.

    Attributes:
        source: the engine that has the pages, with the fingerprint of its model.
        lease: the right to read them.
        expires: end of the lease, in `time.time` seconds of the source's clock.
        moved: the request.
        blocks: its pages by cache group.
        tensors: on the host, drafts for its next verification and their distribution, states of recurrent
            layers: see `Departed`.
        completion: set when the request ended with its first token, and nothing is left to do.
    """

    source: EngineTable
    lease: str
    expires: float
    moved: MovedRequest | None
    blocks: Mapping[str, tuple[int, ...]]
    tensors: Tensors
    completion: Completion | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt, which was read."""
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
        """For another process or host: a magic line, the length of a JSON header, the header, the tensors' bytes."""
        header = {
            "version": VERSION,
            "source": self.source.to_json(),
            "lease": self.lease,
            "expires": self.expires,
            "moved": None if self.moved is None else asdict(self.moved),
            "blocks": dict(self.blocks),
            "completion": None if self.completion is None else asdict(self.completion),
            "tensors": [[name, dtype_name(t.dtype), t.shape] for name, t in self.tensors.items()],
        }
        text = json.dumps(header).encode()
        # As bytes by way of uint8: numpy has no bfloat16.
        parts = [t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in self.tensors.values()]
        return b"".join([_MAGIC, len(text).to_bytes(8, "little"), text, *parts])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its bytes: multiprocessing would send tensors through shared memory."""
        return Handoff.from_bytes, (self.to_bytes(),)

    @classmethod
    def from_bytes(cls, data: bytes) -> Handoff:
        """The inverse of `to_bytes`; no code of the data is run.

        Raises:
            HandoffMismatchError: another version, or no handoff. InvalidInputError: no bytes.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise refuse_type("a handoff", data, "the bytes of Handoff.to_bytes")
        data = bytes(data)
        start = len(_MAGIC) + 8
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
                expires=_SECONDS("expires", header["expires"]),
                moved=None if header["moved"] is None else _moved(header["moved"]),
                blocks={str(group): _numbers(f"blocks of {group}", own) for group, own in header["blocks"].items()},
                tensors=_tensors(header["tensors"], data[start + size :]),
                completion=None if header["completion"] is None else _completion(header["completion"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, HandoffMismatchError):
                raise
            raise HandoffMismatchError(f"this is no handoff: {named_error(error)}") from error


Handoffs = Handoff | Sequence[Handoff]
"""One, or several."""


def _moved(given: Json) -> MovedRequest:
    """Read a request, checking every value: a wrong one would make a round fail, and end other requests with it."""
    read: Json = {"params": SamplingParams.from_dict(given["params"])}
    read |= {name: _numbers(name, given[name]) for name in ("prompt_token_ids", "new_token_ids", "eos_token_ids")}
    read |= {name: whole(name, given[name], 0) for name in _COUNTS}
    read |= {name: _SECONDS(name, given[name]) for name in ("queue_s", "prefill_s")}
    read |= {"key": whole("key", given["key"], 0, 2**64 - 1), "variant": whole("variant", given["variant"], 0, 2**31)}
    if given.keys() != read.keys():
        raise ValueError(f"a request of other fields: {sorted(given.keys() ^ read.keys())}")
    return MovedRequest(**read)


def _numbers(name: str, given: Any) -> tuple[int, ...]:
    """Token ids or page numbers."""
    if not isinstance(given, list):
        raise refuse_type(name, given, "a list of numbers")
    return tuple(whole(name, each, 0) for each in given)


def _text(name: str, given: Any) -> str:
    if not isinstance(given, str):
        raise refuse_type(name, given, "a text")
    return given


def _completion(given: Json) -> Completion:
    stats = RequestStats(**{**given["stats"], "rounds": ()})  # it ended with the prompt's token: no round
    drafts = None if given["drafts"] is None else ()
    return replace(Completion(**given), stats=stats, drafts=drafts)


def _tensors(given: list[Any], data: bytes) -> StateDict:
    found = {}
    at = 0
    for name, dtype, shape in given:
        kind = _DTYPES[dtype]
        size = math.prod(shape) * kind.itemsize
        if not 0 <= size <= len(data) - at:
            raise ValueError(f"tensor {name} is cut off")
        raw = torch.tensor(np.frombuffer(data[at : at + size], np.uint8))
        found[str(name)] = raw.view(kind).view(shape)
        at += size
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes more than its tensors have")
    return found
