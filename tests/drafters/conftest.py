"""Fixtures of tests of drafts."""

from __future__ import annotations

from tests.mtp_cases import tiny_case

__all__ = ["tiny_case"]
