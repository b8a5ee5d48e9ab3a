"""Documents of evaluations, as tests compare them."""

from __future__ import annotations

from typing import Any


def without_times(document: Any) -> Any:
    """The document without its "timing" parts: what two runs of the same settings have in common."""
    if isinstance(document, dict):
        return {key: without_times(value) for key, value in document.items() if key != "timing"}
    if isinstance(document, list):
        return [without_times(value) for value in document]
    return document
