"""What forked workers say of the snapshots they used, so that the parent knows the unused ones.

syrupy rebuilds its report from those of pytest-xdist's workers and fails a run that left a
snapshot unused. Our workers are none of xdist's: each report is made and handed over here.
"""

import os
from typing import Any

import pytest

_XDIST_WORKER = "PYTEST_XDIST_WORKER"  # by which syrupy knows a worker


def of_worker(config: pytest.Config, worker: str) -> dict[str, Any] | None:
    """End syrupy's session in a worker; return its report, None if syrupy is not loaded."""
    syrupy = getattr(config, "_syrupy", None)
    if syrupy is None:
        return None
    output: dict[str, Any] = {}
    config.workeroutput = output  # type: ignore[attr-defined]
    before = os.environ.get(_XDIST_WORKER)
    os.environ[_XDIST_WORKER] = worker
    try:
        syrupy.finish()
    finally:
        if before is None:
            del os.environ[_XDIST_WORKER]
        else:
            os.environ[_XDIST_WORKER] = before
    return output.get("syrupy_report")


def add(config: pytest.Config, report: dict[str, Any]) -> None:
    """Count in the parent what a worker used."""
    config._syrupy.add_worker_report(report)  # type: ignore[attr-defined]
