"""A replay beside the real queue: 200 jobs of two teams on rows of the database."""

from datetime import timedelta
from heapq import heappop, heappush

import pytest
import time_machine

from runners.jobspec import TrainSpec
from tests.webapp.conftest import EXIT_OK, batch_of, claim, make_job
from tests.webapp.queue.conftest import gpu_host
from webapp.agents.ingest import events_accept
from webapp.core.clock import now
from webapp.hosts.models import Host
from webapp.jobs.allocation import allocate_pool
from webapp.jobs.models import Attempt, Job, JobState
from webapp.jobs.services import job_submit
from webapp.replay.replaying import replay
from webapp.replay.traces import even_fleet, shaped

pytestmark = [pytest.mark.django_db(databases="__all__"), pytest.mark.equality]
NUM_JOBS, NUM_HOSTS, DEVICES = 200, 4, 8


def trace_of_two_teams():
    """Return a shape's trace whose jobs come at instants of their own and fit the hosts."""
    trace = shaped(
        "helios", NUM_JOBS, NUM_HOSTS * DEVICES, devices_per_host=DEVICES, load=3.0, seed=2
    )
    shapes = [s._replace(num_hosts=min(s.num_hosts, NUM_HOSTS)) for s in trace.shapes]
    submitted = [at + 0.001 * number for number, at in enumerate(trace.submitted)]
    fields = {"team_names": ["a", "b"], "teams": [each % 2 for each in trace.teams]}
    return type(trace)(
        **{
            **vars(trace),
            **fields,
            "shapes": shapes,
            "submitted": submitted,
            "weights": [1.0, 1.0],
        }
    )


def test_a_replay_starts_200_jobs_when_and_in_the_order_in_which_the_real_queue_does(
    team, alice, other_team, charlie
):
    trace = trace_of_two_teams()
    hosts = [gpu_host(team, f"node-{number}", DEVICES) for number in range(NUM_HOSTS)]
    pool = hosts[0].pool
    Host.objects.update(pool=pool)
    pool.shared_with.add(other_team)
    found = replay(trace, even_fleet(NUM_HOSTS, DEVICES))
    starts, ends, jobs = {}, [], {}
    began, following = now() + timedelta(seconds=1), 0
    order: list[str] = []
    while following < NUM_JOBS or ends:
        is_end = ends and (following == NUM_JOBS or ends[0][0] <= trace.submitted[following])
        at = ends[0][0] if is_end else trace.submitted[following]
        with time_machine.travel(began + timedelta(seconds=at), tick=False):
            Host.objects.update(last_seen_at=now())
            if is_end:
                job = Job.objects.get(pk=heappop(ends)[1])
                for member in Attempt.objects.filter(job=job).order_by("node_rank"):
                    claim(member)
                for member in Attempt.objects.filter(job=job).order_by("node_rank"):
                    events_accept(host=member.host, batch=batch_of(member, ("exited", EXIT_OK)))
                allocate_pool(pool)
            else:
                shape, is_first = trace.shapes[following], trace.teams[following] == 0
                job = make_job(
                    team if is_first else other_team,
                    alice if is_first else charlie,
                    None,
                    pool=pool,
                    num_hosts=shape.num_hosts,
                    devices_per_host=shape.devices,
                    spec=TrainSpec(time_budget_seconds=trace.seconds[following]),
                )
                jobs[job.pk] = following
                job_submit(job=job, by="alice" if is_first else "charlie")
                following += 1
            for pk in Job.objects.filter(state=JobState.PREFLIGHT).values_list("pk", flat=True):
                if pk not in starts:
                    starts[pk] = at
                    order.append(pk)
                    heappush(ends, (at + trace.seconds[jobs[pk]], pk))
    real = {jobs[pk]: at for pk, at in starts.items()}
    waited = [job for job in range(NUM_JOBS) if real[job] > trace.submitted[job]]
    assert len(waited) > 40  # else there was nothing to decide
    different = [job for job in range(NUM_JOBS) if abs(real[job] - found.starts[job]) > 1e-3]
    assert not different, [(job, real[job], found.starts[job]) for job in different[:5]]
    given = [real[jobs[pk]] for pk in order]
    assert given == sorted(given)
