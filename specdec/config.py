"""EngineConfig: the sizes and limits of one engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from attention.spec import Reach
from specdec.errors import InvalidInputError

KV_CACHE_DTYPES = ("auto", "fp8")
"""How the target's keys and values are stored, see `specdec.loading.cache_format.kv_format`."""
STATE_DTYPES = ("float32", "bfloat16")
"""How states of recurrent layers are kept between forwards."""
KV_CACHE_LAYOUTS = ("auto", "NHD", "HND")
"""Order inside a page of the target's and the head's cache, see `specdec.loading.cache_format.kv_layout`."""
CPU_LINEARS = ("auto", "packed", "plain")
"""Weights of linear layers on a CPU, see `specdec.wrapped.linears.why_plain`."""
DRAFT_SAMPLING = ("probabilistic", "greedy")
"""Drafts of sampled rows: drawn from the head's distribution, or its most probable token. Both are lossless."""
SAMPLING = ("rejection", "keyed")
"""How sampled tokens are drawn: drafts are accepted by the ratio of probabilities, else the token is drawn again; or
by noise that the token's position alone decides, which no draft changes. Both are lossless."""
MAX_NUM_PREFILL_TOKENS = 512
"""From some 200 tokens on a forward takes time by the token, so larger chunks hardly give more tokens a second. In a
simulation with measured rounds of an H200 (simulate_serving in commit 62c2095: Llama-3.1-8B shape, K=3), a round of 16
rows takes 3.0 times as long with 512 prompt tokens as without, with 640 3.3 times; a full queue gives 3 to 5 % more
tokens a second with 1,024 and more than with 512, with 384 2 % fewer, with 256 10 %, and with 128 35 %."""
TESTED_ROWS = 3
"""Rows of the load-time self-test."""
SEEDS = (-(2**63), 2**64 - 1)
"""Least and largest seed: 64 bits, as torch.manual_seed has them: a negative one is the same as 2**64 more."""


def state_slots(max_num_seqs: int) -> int:
    """Slots of recurrent states for so many rows, and the null slot; the self-test reads three rows.

    >>> state_slots(32), state_slots(1)
    (33, 4)
    """
    return 1 + max(max_num_seqs, TESTED_ROWS)


class WindowedPool(NamedTuple):
    """Pages of the layers of one reach, in a windowed cache group of their own, see `attention.groups`.

    num_pages: of the pool, the null page included.
    """

    reach: Reach
    num_pages: int


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and limits. All counts are in tokens unless the name has another unit.

    Attributes:
        num_speculative_tokens: K, drafts a round (the bonus token not counted); 0 is no speculation.
        max_model_len: most positions of one request. max_num_seqs: most requests in one batch (B).
        max_num_batched_tokens: most tokens of one target forward; longer prompts are read in chunks.
        page_size: tokens a page. num_pages: pages of the target's first group, the null page included.
        seed: randomness of requests without a seed of their own. draft_sampling: see `DRAFT_SAMPLING`. sampling: see
            `SAMPLING`.
        max_num_prefill_tokens: most prompt tokens of a target forward in which rows of other calls decode: it bounds
            how much longer prompts make the time between two tokens of those rows. Where only rows of the prompts' own
            call decode, or none, `max_num_batched_tokens` holds.
        windowed: the target's further cache groups, see `attention.groups`.
        enable_prefix_caching: whether requests begin with pages that earlier ones left, see `attention.cache.prefix`.
        keep_prefixes: keep those of earlier calls where a hook or parametrization of the target has hidden state, see
            `specdec.wrapped.changes`.
        max_waiting_requests: most requests beyond `max_num_seqs` that may be in the engine; None: any number.
        block_size: Q, tokens that a head writes behind a row's committed ones, however many drafts the row may have,
            beyond max_model_len too; 0 where it writes as many as there are drafts.
        extras: what only some engines' rounds have, see `specdec.rounds.extras.RoundExtra`; at most one of a class.
    """

    num_speculative_tokens: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int
    seed: int = 0
    draft_sampling: str = "probabilistic"
    sampling: str = "rejection"
    max_num_prefill_tokens: int = MAX_NUM_PREFILL_TOKENS
    windowed: tuple[WindowedPool, ...] = ()
    enable_prefix_caching: bool = False
    keep_prefixes: bool = False
    block_size: int = 0
    extras: tuple[Any, ...] = ()
    max_waiting_requests: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidInputError for sizes that cannot work together."""
        for name in ("max_model_len", "max_num_seqs", "page_size", "max_num_prefill_tokens"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{name}={getattr(self, name)}: allowed is 1 or more")
        if self.num_speculative_tokens < 0:
            raise InvalidInputError(f"num_speculative_tokens={self.num_speculative_tokens}: allowed is 0 or more")
        needed = self.max_num_seqs * (self.num_speculative_tokens + 1)
        if self.max_num_batched_tokens < needed:
            raise InvalidInputError(
                f"max_num_batched_tokens={self.max_num_batched_tokens}: {self.max_num_seqs} requests with "
                f"{self.num_speculative_tokens} drafts each need at least {needed}; lower max_num_seqs or raise it"
            )

    @property
    def draws_drafts(self) -> bool:
        """Whether drafts of sampled rows are drawn from the head's distribution, which acceptance then reads."""
        return self.draft_sampling == "probabilistic" and not self.keyed

    @property
    def keyed(self) -> bool:
        """Whether sampled tokens follow from noise that is keyed by position, see `specdec.requests.noise`."""
        return self.sampling == "keyed"

    @property
    def keys_drafts(self) -> bool:
        """Whether drafts of sampled rows do, too; else each is its distribution's arg max."""
        return self.keyed and self.draft_sampling == "probabilistic"

    @property
    def tokens_behind(self) -> int:
        """Tokens that a head writes at most behind a row's committed ones: K, or Q."""
        return max(self.num_speculative_tokens, self.block_size)

    @property
    def num_head_pages(self) -> int:
        """Pages of the head's pool: what fits the target's fits here, with the tokens that a head writes behind."""
        return self.num_pages + self.max_num_seqs * -(-self.tokens_behind // self.page_size)
