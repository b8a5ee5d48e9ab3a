"""EngineConfig: the sizes and limits of one engine."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.errors import InvalidInputError

BACKENDS = ("auto", "torch", "flashinfer", "batch_invariant")
"""Names of attention backends, see `specdec.loading.backends`."""
KV_CACHE_DTYPES = ("auto", "fp8")
"""How the target's keys and values are stored, see `specdec.loading.backends.kv_format`."""
DRAFT_SAMPLING = ("probabilistic", "greedy")
"""Drafts of sampled rows: drawn from the head's own distribution, under the row's temperature and filters, or the most
probable token. Both are lossless."""
SEEDS = (-(2**63), 2**64 - 1)
"""Least and largest seed: 64 bits, as torch.manual_seed has them: a negative one is the same as 2**64 more."""


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and limits. All counts are in tokens unless the name says otherwise.

    Attributes:
        num_speculative_tokens: K, drafts a round (the bonus token not counted); 0 is no speculation.
        max_model_len: most positions of one request (prompt and new tokens).
        max_num_seqs: most requests in one batch (B).
        max_num_batched_tokens: most tokens of one target forward; longer prompts are read in chunks.
        page_size: tokens a page.
        num_pages: pages of the target's pool, the null page included.
        seed: randomness of requests without a seed of their own.
        draft_sampling: how drafts of sampled rows are chosen, see `DRAFT_SAMPLING`.
    """

    num_speculative_tokens: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int
    seed: int = 0
    draft_sampling: str = "probabilistic"

    def __post_init__(self) -> None:
        """Raises InvalidInputError for sizes that cannot work together."""
        for name in ("max_model_len", "max_num_seqs", "page_size"):
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
        """Whether drafts of sampled rows are drawn from the head's distribution; else each is its arg max."""
        return self.draft_sampling == "probabilistic"

    @property
    def num_head_pages(self) -> int:
        """Pages of the head's pool: what fits the target's fits here, with K more tokens a row."""
        return self.num_pages + self.max_num_seqs * -(-self.num_speculative_tokens // self.page_size)
