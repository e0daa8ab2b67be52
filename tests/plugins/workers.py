"""No garbage collection while a worker of xdist imports, and none of what it has imported.

To collect the tests makes a million objects of Django, torch and transformers, which live until
the end of the run. Collections of garbage meanwhile took 7 of each worker's 34 s of CPU time.
"""

import gc

import pytest


def is_worker(config: pytest.Config) -> bool:
    """Return whether this process is a worker of xdist."""
    return hasattr(config, "workerinput")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Stop the garbage collector until the tests are collected."""
    if is_worker(session.config):
        gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take what lives until the end out of the garbage collector's sight, and start it.

    It collects the youngest objects every 10,000 allocations instead of 700: a test makes few
    cycles and ends soon.
    """
    if is_worker(session.config):
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()
