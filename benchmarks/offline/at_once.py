"""A pytest plugin: every outcome with its seconds as it comes, and a failure's end, for a run that may be cut short."""

from __future__ import annotations

import pytest

_MOST = 2500


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One line a test."""
    if report.when == "call" or report.outcome != "passed":
        print(f"## {report.outcome} {report.duration:.1f} {report.when} {report.nodeid}", flush=True)
    if report.failed:
        print(report.longreprtext[-_MOST:], flush=True)
