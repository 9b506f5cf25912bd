"""A pytest plugin: a test that is skipped has failed, unless it is marked `slow`.

A skipped test proves nothing, and among hundreds that pass nobody sees it. pyproject.toml loads this with `-p`.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

RULE = "skipped, but only tests marked `slow` may be skipped"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the skip of a test into a failure. An expected failure (xfail) is reported as skipped too, and stays."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("slow") is None:
        fail(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn the skip of a whole module into a failure. Its marks were never read: a slow test must skip from inside."""
    report = yield
    if report.skipped:
        fail(report)
    return report


def fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Make a skip report a failure that names the test and the reason it gave."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid}: {RULE} ({reason})"
