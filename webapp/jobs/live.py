"""Tell open pages about events that were just stored."""

import math
import time
from collections.abc import Callable
from typing import Any

from runners.messages import RunEvent
from webapp.jobs.models import Attempt
from webapp.live.publish import jobs_topic, publish

LIST_SECONDS = 1.0


class Pace:
    """Lets one message a second through for each key: lists need no more to look alive."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, float] = {}

    def may_go(self, key: str) -> bool:
        """Return whether a second has passed since this last said yes."""
        instant = self._clock()
        if instant - self._last.get(key, -LIST_SECONDS) < LIST_SECONDS:
            return False
        self._last[key] = instant
        return True


list_pace = Pace()


def announce(attempt: Attempt, events: list[RunEvent]) -> None:
    """Publish a committed batch: points and log lines together, of progress only the last."""
    topic = f"job:{attempt.job_id}"
    common = {"job": attempt.job_id, "attempt": attempt.pk, "host": attempt.node_rank}
    by_kind: dict[str, list[RunEvent]] = {}
    for event in events:
        by_kind.setdefault(event.kind, []).append(event)
    if points := by_kind.get("metric"):
        data = [{"t_ms": event.t_ms, **_drawable(event.body)} for event in points]
        publish(topic, "job.metric", {**common, "points": data})
    if lines := by_kind.get("log"):
        data = [{"seq": event.seq, "t_ms": event.t_ms, **event.body} for event in lines]
        publish(topic, "job.log", {**common, "lines": data})
    if result := by_kind.get("result"):
        publish(topic, "job.result", {**common, **result[-1].body})
    _announce_progress(attempt, common, by_kind)


def _announce_progress(
    attempt: Attempt, common: dict[str, Any], by_kind: dict[str, list[RunEvent]]
) -> None:
    progress = by_kind.get("progress", [])
    phases = by_kind.get("phase", [])
    if attempt.node_rank or (not progress and not phases):
        return  # the first host speaks for the whole job
    data = {**common}
    if progress:
        data |= progress[-1].body
    if phases:
        data["phase"] = phases[-1].body.get("name")
    publish(f"job:{attempt.job_id}", "job.progress", data)
    if list_pace.may_go(attempt.job.team_id):
        publish(jobs_topic(attempt.job.team_id), "job.progress", data)


def _drawable(point: dict[str, Any]) -> dict[str, Any]:
    """Return a point without values that JSON cannot carry, such as a diverged loss."""
    values = {name: value for name, value in point["values"].items() if math.isfinite(value)}
    return {**point, "values": values}
