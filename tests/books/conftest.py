"""The fixtures of the web side's tests, which the books of launches and pages are made with."""

from tests.webapp.conftest import (
    _cheap_passwords,
    _no_calls_before,
    alice,
    enrolled,
    host,
    team,
)
from tests.webapp.plans.conftest import demo_plan, plan_of, trained

__all__ = [
    "_cheap_passwords",
    "_no_calls_before",
    "alice",
    "demo_plan",
    "enrolled",
    "host",
    "plan_of",
    "team",
    "trained",
]
