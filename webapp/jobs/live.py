"""Publish stored events to open pages."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from runners.messages import RunEvent
from webapp.jobs.models import Attempt, Job
from webapp.live.publish import jobs_topic, publish_all

LIST_SECONDS = 1.0
Message = tuple[str, str, Mapping[str, Any]]  # topic, event, data


class Pace:
    """Rate limit of one message per second and key, enough for lists."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}

    def may_go(self, key: str) -> bool:
        """Return whether a message may be sent: a second has passed since the last one."""
        instant = self._clock()
        if instant - self._last.get(key, -LIST_SECONDS) < LIST_SECONDS:
            return False
        self._last[key] = instant
        return True


list_pace = Pace()


def announce(attempt: Attempt, events: list[RunEvent]) -> None:
    """Publish a committed batch of one attempt."""
    teams = Job.objects.filter(pk=attempt.job_id).values_list("team_id", flat=True)
    publish_all(messages_of(attempt, teams.get(), events))


def messages_of(attempt: Attempt, team_id: str, events: list[RunEvent]) -> Iterator[Message]:
    """Yield the messages of a batch: points and log lines together, the latest progress."""
    topic = f"job:{attempt.job_id}"
    common = {"job": attempt.job_id, "attempt": attempt.pk, "host": attempt.node_rank}
    by_kind: dict[str, list[RunEvent]] = {}
    for event in events:
        by_kind.setdefault(event.kind, []).append(event)
    if points := by_kind.get("metric"):
        data = [{"t_ms": event.t_ms, **_drawable(event.body)} for event in points]
        yield topic, "job.metric", {**common, "points": data}
    if lines := by_kind.get("log"):
        data = [{"seq": event.seq, "t_ms": event.t_ms, **event.body} for event in lines]
        yield topic, "job.log", {**common, "lines": data}
    if result := by_kind.get("result"):
        yield topic, "job.result", {**common, **result[-1].body}
    if not attempt.node_rank:  # rank 0 reports for the whole job
        yield from _progress(topic, team_id, common, by_kind)


def _progress(
    topic: str, team_id: str, common: dict[str, Any], by_kind: dict[str, list[RunEvent]]
) -> Iterator[Message]:
    progress = by_kind.get("progress", [])
    phases = by_kind.get("phase", [])
    if not progress and not phases:
        return
    data = {**common}
    if progress:
        data |= progress[-1].body
    if phases:
        data["phase"] = phases[-1].body.get("name")
    yield topic, "job.progress", data
    if list_pace.may_go(team_id):
        yield jobs_topic(team_id), "job.progress", data


def _drawable(point: dict[str, Any]) -> dict[str, Any]:
    """Return a point without non-finite values, which JSON cannot carry."""
    values = {name: value for name, value in point["values"].items() if math.isfinite(value)}
    return {**point, "values": values}
