"""What open pages hear of an attempt's stored events."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from runners.shared.messages import RunEvent
from webapp.jobs.models import Attempt
from webapp.live.stream import jobs_topic

LIST_SECONDS = 1.0
LONGEST_PHASE = 80
# Of one message's lines: Redis and every web process keep those of the last minutes in memory.
MAX_LIVE_CHARACTERS = 64 * 1024
RESYNC = "resync"  # the page reads the store instead
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


def messages_of(attempt: Attempt, team_id: str, events: Sequence[RunEvent]) -> Iterator[Message]:
    """Yield the messages of a batch: its log lines, the latest progress, and what else has come.

    Points and results are not in them: pages read them from the store, with what belongs to them.
    """
    topic = f"job:{attempt.job_id}"
    common = {"job": attempt.job_id, "attempt": attempt.pk, "host": attempt.node_rank}
    by_kind: dict[str, list[RunEvent]] = {}
    for event in events:
        by_kind.setdefault(event.kind, []).append(event)
    if "metric" in by_kind:
        yield topic, "job.metric", {"host": attempt.node_rank}
    if lines := by_kind.get("log"):
        data = [{"seq": event.seq, "t_ms": event.t_ms, **_line(event.body)} for event in lines]
        is_short = sum(len(line["text"]) for line in data) <= MAX_LIVE_CHARACTERS
        yield (topic, "job.log", {**common, "lines": data}) if is_short else (topic, RESYNC, {})
    if "result" in by_kind:
        yield topic, "job.result", {"host": attempt.node_rank}
    if not attempt.node_rank:  # rank 0 reports for the whole job
        yield from _publish_progress(topic, team_id, common, by_kind)


def _line(body: Mapping[str, Any]) -> dict[str, Any]:
    return {"stream": body["stream"], "text": body["text"]}


def _publish_progress(
    topic: str, team_id: str, common: dict[str, Any], by_kind: dict[str, list[RunEvent]]
) -> Iterator[Message]:
    progress = by_kind.get("progress", [])
    phases = by_kind.get("phase", [])
    if not progress and not phases:
        return
    data = {**common}
    if progress:
        data |= {name: progress[-1].body[name] for name in ("done", "total")}
    if phases:
        data["phase"] = phases[-1].body["name"][:LONGEST_PHASE]
    yield topic, "job.progress", data
    if list_pace.may_go(team_id):
        yield jobs_topic(team_id), "job.progress", data
