"""What a person adds to a launch, and what the team's quota says of it before the button."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from webapp.core.problems import InvalidProblem, Problem
from webapp.jobs.models import Job, Priority
from webapp.plans.measuring import Measuring
from webapp.plans.serving import EndpointWish
from webapp.queue.quotas import check_submit, told_limits

LEAST_SECONDS, MOST_SECONDS = 36.0, 8784 * 3600.0


class Wish(NamedTuple):
    """What a person adds to a launch."""

    max_duration_seconds: float | None = None
    max_retries: int = 0
    priority: int = Priority.NORMAL
    endpoint: EndpointWish | None = None  # a serve plan stays up instead of being measured
    measuring: Measuring = Measuring()
    adapter: str = ""  # of a generation: one by name, or "all"
    draft: str = ""  # the id of the team's model that guesses ahead


NOTHING_MORE = Wish()


def wish_of(posted: Mapping[str, str]) -> Wish:
    """Return what the launch form says.

    Raises:
        InvalidProblem: a field holds what it cannot.
    """
    hours, retries = posted.get("hours", "").strip(), posted.get("retries", "0").strip() or "0"
    try:
        seconds = float(hours) * 3600 if hours else None
    except ValueError:
        seconds = math.nan
    if seconds is not None and not LEAST_SECONDS <= seconds <= MOST_SECONDS:
        raise InvalidProblem(
            "hours", f"“Stop it after” is {hours[:20]}; it can be 0.01 to 8784 hours, or empty."
        )
    if not retries.isdecimal():
        raise InvalidProblem("retries", f"“Try again” is {retries[:20]}; it can be 0 to 5.")
    is_low = posted.get("priority") == str(Priority.LOW.value)
    adapter = posted.get("adapter", "").strip()
    priority = Priority.LOW if is_low else Priority.NORMAL
    draft = posted.get("draft", "").strip()
    return Wish(seconds, int(retries), priority, adapter=adapter, draft=draft)


def quota_note(job: Job) -> dict[str, str]:
    """Return what the team's quota says of a job: how much is left, or why it is refused."""
    limits = "; ".join(told_limits(job.team, job.owner_id))
    try:
        check_submit(job)
    except Problem as problem:
        return {"can": "", "title": "Your team's limit", "text": problem.detail, "limits": limits}
    return {"limits": limits}
