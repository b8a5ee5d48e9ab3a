"""What requests hold is told while they run, and is nothing when they have ended."""

from __future__ import annotations

import pytest
from fakes import random_prompts, scheduler_of, table_head, tiny_llama, wrap

from attention.errors import InvariantError
from specdec.engine.scheduler import Usage
from specdec.errors import RequestFailedError
from specdec.requests.sampling import SamplingParams

PROMPTS = random_prompts((5, 9, 3))
PARAMS = SamplingParams(max_new_tokens=12)


@pytest.mark.parametrize("drafts", [0, 3])
def test_usage_counts_requests_rows_and_pages(drafts: int) -> None:
    head = table_head(tiny_llama()) if drafts else None
    wrapped = wrap(tiny_llama(), head, num_speculative_tokens=drafts, max_num_seqs=2, page_size=4)
    assert wrapped.usage() == Usage()
    stream = wrapped.stream(PROMPTS, PARAMS)
    next(stream)
    held = wrapped.usage()
    assert (held.requests, held.waiting, held.running, held.rows) == (3, 1, 2, 2)
    assert held.target_pages >= 2 + 3, "prompts of 5 and 9 tokens, 4 tokens a page"
    assert (held.head_pages > 0) == (drafts > 0)
    stream.close()
    assert wrapped.usage() == Usage()


def test_a_page_without_an_owner_is_told() -> None:
    wrapped = wrap(tiny_llama())
    scheduler_of(wrapped).target_pages.allocator.allocate(1)
    with pytest.raises(InvariantError, match="1 pages are lost"):
        wrapped.usage()


def test_usage_is_not_for_a_round() -> None:
    """A tokenizer that asks for it inside a round would wait for itself."""
    wrapped = wrap(tiny_llama())
    plain = wrapped.tokenizer.decode

    def asking(*args: object, **kwargs: object) -> str:
        wrapped.usage()
        return str(plain(*args, **kwargs))

    wrapped.tokenizer.decode = asking
    with pytest.raises(RequestFailedError, match="called from inside one of its own rounds"):
        wrapped.generate(PROMPTS[0], PARAMS)
