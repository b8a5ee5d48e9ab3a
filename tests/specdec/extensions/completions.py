"""A completion, for tests of what extensions make of one."""

from __future__ import annotations

from typing import Any

from specdec.requests.request import Completion
from specdec.requests.stats import RequestStats, RoundRecord


def completion(text: str = "ab", **changes: Any) -> Completion:
    """Three new tokens of two rounds."""
    stats = RequestStats((RoundRecord(3, 1, 2),), prompt_tokens=4, new_tokens=3)
    return Completion(
        **{"text": text, "token_ids": [1, 2, 3], "prompt_token_ids": [1] * 4, "finish_reason": "length", "stats": stats}
        | changes
    )
