"""Launch options of a person, and the team's quota for the launch."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from webapp.core.problems import InvalidProblem, Problem
from webapp.jobs.models import Job, Priority
from webapp.plans.measuring import Measuring
from webapp.plans.serving import EndpointOptions
from webapp.queue.quotas import check_submit, limit_sentences

LEAST_SECONDS, MOST_SECONDS = 36.0, 8784 * 3600.0


class LaunchOptions(NamedTuple):
    """The options of a launch form."""

    max_duration_seconds: float | None = None
    max_retries: int = 0
    priority: int = Priority.NORMAL
    endpoint: EndpointOptions | None = None  # run as an endpoint instead of a benchmark
    measuring: Measuring = Measuring()
    adapter: str = ""  # for a generation: an adapter by name, or "all"
    draft: str = ""  # id of the team model that drafts


NOTHING_MORE = LaunchOptions()


def launch_options_of(posted: Mapping[str, str]) -> LaunchOptions:
    """Return the options of a posted launch form.

    Raises:
        InvalidProblem: a field is invalid.
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
    return LaunchOptions(seconds, int(retries), priority, adapter=adapter, draft=draft)


def quota_note(job: Job) -> dict[str, str]:
    """Return the quota note of a job: remaining limits, or why it is refused."""
    limits = "; ".join(limit_sentences(job.team, job.owner_id))
    try:
        check_submit(job)
    except Problem as problem:
        return {"can": "", "title": "Your team's limit", "text": problem.detail, "limits": limits}
    return {"limits": limits}
