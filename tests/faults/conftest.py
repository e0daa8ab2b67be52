"""One real product whose parts are killed, and what its databases hold afterwards."""

import json
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.stack import Stack

LOOK_INSIDE = """
import json
from webapp.jobs.models import Attempt, AttemptEvent, Event
from webapp.metrics.models import MetricSource
from webapp.metrics.read import read_raw
job_id = {job_id!r}
attempts = list(Attempt.objects.filter(job_id=job_id))
last = attempts[-1]
rows = list(AttemptEvent.objects.filter(attempt=last).values_list("seq", "kind"))
points = {{}}
for source in MetricSource.objects.filter(attempt_id=last.pk):
    for name in source.metrics:
        for seq in read_raw(last.pk, source.source, name).seq:
            points.setdefault(int(seq), set()).add(source.source)
print(json.dumps({{
    "num_attempts": len(attempts),
    "acked_seq": last.acked_seq,
    "row_seqs": [seq for seq, _ in rows],
    "kinds": [kind for _, kind in rows],
    "point_seqs": sorted(points),
    "states": list(Event.objects.filter(subject=job_id, kind="job.state")
                   .order_by("id").values_list("to_state", flat=True)),
}}))
"""


class Stored(NamedTuple):
    """What the databases hold of a job, read past every page and API."""

    num_attempts: int
    acked_seq: int
    row_seqs: list[int]
    kinds: list[str]
    point_seqs: list[int]
    states: list[str]


def stored(stack: Stack, job_id: str) -> Stored:
    """Return what the databases hold of a job."""
    answer = stack.run("manage.py", "shell", "-v", "0", "-c", LOOK_INSIDE.format(job_id=job_id))
    return Stored(**json.loads(answer.strip().splitlines()[-1]))


@pytest.fixture(scope="session")
def faulty_stack(tmp_path_factory) -> Iterator[Stack]:
    """A product whose demo trains for twelve seconds."""
    with Stack(tmp_path_factory.mktemp("faults"), demo_seconds=12) as running:
        yield running
