"""CPU time of pages on sites with a long history, by number of jobs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from http import HTTPStatus
from math import log
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from django.contrib.auth.models import User
from django.db import connection, transaction
from django.db.backends.utils import CursorWrapper
from django.test import Client

from runners.plans.document import HardwareChoice, ModelChoice
from webapp.accounts.models import Membership, Team
from webapp.bench.host_load import beat_of, facts_of
from webapp.core.clock import now
from webapp.core.queries import migrate_databases
from webapp.hosts.models import Device, Host, HostState, Pool
from webapp.jobs.models import IN_TURN, Attempt, Job, JobState, Measurement
from webapp.jobs.waiting import FORESEEN_TURNS
from webapp.plans.models import Plan, PlanState
from webapp.wizard.drafts import goal_change, options_for, step_form

HOSTS, PLANS, WAITING = 200, 1_000, 5_000
JOB_BYTES, PLAN_BYTES = 36_000, 180_000  # documents per row, as of the demo and a large plan
ROUNDS = 5
USER = "bench"
LAST = 10**4  # a page number beyond the end yields the last page
STATES = ("succeeded", "failed", "stopped", "error")
KINDS = ("train", "compress", "generate", "benchmark")
PAGES = {
    "jobs": "/jobs/",
    "jobs, the last page": f"/jobs/?page={LAST}",
    "jobs that failed": "/jobs/?state=failed",
    "jobs of a kind": "/jobs/?kind=compress",
    "jobs of a host": "/jobs/?host=node-7",
    "jobs of a person": f"/jobs/?owner={USER}",
    "jobs by name": "/jobs/?q=run+77",
    "jobs by a name that none has": "/jobs/?q=no+such+name",
    "jobs by every filter": f"/jobs/?state=failed&kind=compress&owner={USER}&q=run",
    "jobs that failed, the last page": f"/jobs/?state=failed&page={LAST}",
    "plans": "/plans/",
    "plans, the last page": f"/plans/?page={LAST}",
    "plans by name": "/plans/?q=plan+7",
    "plans by a name that none has": "/plans/?q=no+such+name",
    "hosts": "/hosts/",
    "a host": "/hosts/node-7/",
    "compare's chooser": "/compare/",
    "home": "/",
    "queue": "/queue/",
    "queue, the last turns": f"/queue/?offset={LAST}",
    "the first waiting job": "/jobs/{first}/",
    "the last waiting job with a forecast": "/jobs/{foreseen}/",
    "the last waiting job": "/jobs/{last}/",
}


class Waiting(NamedTuple):
    """Ids of queued jobs: the first, the last with a forecast, and the last."""

    first: str
    foreseen: str
    last: str


def fill(num_jobs: int, *, num_waiting: int = WAITING) -> Waiting:
    """Fill a migrated database and return ids of queued jobs.

    Hosts, plans and jobs are copies of one row each; ``num_waiting`` more jobs are queued.
    """
    with transaction.atomic():
        team = Team.objects.create(name="Bench")
        user = User.objects.create_user(USER, password=None)
        Membership.objects.create(user=user, team=team, role="admin")
        first = _first_rows(team, user)
        with connection.cursor() as cursor:
            _copy(cursor, "hosts_host", first["host"], HOSTS - 1, {
                "name": "'node-' || n", "slug": "'node-' || n",
            })  # fmt: skip
            _copy(cursor, "hosts_device", first["device"], HOSTS - 1, {
                "host_id": f"'{_prefix('hosts_host')}' || n", "uuid": "'uuid-' || n",
                "hardware": "'hw-' || n",
            })  # fmt: skip
            past = _minutes_ago(connection.vendor, now().isoformat(" "))
            _copy(cursor, "plans_plan", first["plan"], PLANS - 1, {
                "name": "'plan ' || n", "series": f"'{_prefix('plans_plan')}' || n",
                "saved_at": past,
            })  # fmt: skip
            _copy(cursor, "jobs_job", first["job"], num_jobs + num_waiting - 1, {
                "name": "'run ' || n",
                "state": _one_of(STATES),
                "kind": _one_of(KINDS),
                "host_id": f"'{_prefix('hosts_host')}' || (1 + n %% {HOSTS - 1})",
                "plan_id": f"'{_prefix('plans_plan')}' || (1 + n %% {PLANS - 1})",
                "created_at": past,
                "ended_at": past,
            })  # fmt: skip
            _measure(cursor, first, num_jobs, num_waiting)
            waiting = ", ".join(
                f"{name} = {value}"
                for name, value in {
                    "state": "'queued'", "host_id": "null", "ended_at": "null",
                }.items()
            )  # fmt: skip
            cursor.execute(
                f"update jobs_job set {waiting} where id in "  # noqa: S608 -- no value of a user
                f"(select id from jobs_job order by created_at desc limit {num_waiting})"
            )
            cursor.execute("analyze")
    queue = Job.objects.filter(state=JobState.QUEUED).order_by(*IN_TURN)
    keys = list(queue.values_list("pk", flat=True))
    return Waiting(keys[0], keys[min(FORESEEN_TURNS, len(keys)) - 1], keys[-1])


def _measure(cursor: CursorWrapper, first: dict[str, str], num_jobs: int, behind: int) -> None:
    """Add an attempt and a measurement to every finished job."""
    key = f"'{_prefix('jobs_job')}' || (n + {behind})"
    past = _minutes_ago(connection.vendor, now().isoformat(" "))
    host = f"'{_prefix('hosts_host')}' || (1 + (n + {behind}) %% {HOSTS - 1})"
    _copy(cursor, "jobs_attempt", first["attempt"], num_jobs - 1, {
        "job_id": key, "host_id": host,
    })  # fmt: skip
    _copy(cursor, "jobs_measurement", first["measurement"], num_jobs - 1, {
        "host_id": host,
        "id": f"n + {first['measurement']}",
        "job_id": key,
        "attempt_id": f"'{_prefix('jobs_attempt')}' || n",
        "measured_at": past,
    })  # fmt: skip


def _prefix(table: str) -> str:
    return f"{table[:3].upper()}-"


def _one_of(words: Sequence[str]) -> str:
    cases = " ".join(f"when {at} then '{word}'" for at, word in enumerate(words))
    return f"case n %% {len(words)} {cases} end"


def _minutes_ago(vendor: str, at: str) -> str:
    if vendor == "sqlite":
        return f"strftime('%%Y-%%m-%%d %%H:%%M:%%f', '{at}', '-' || n || ' minutes')"
    return f"timestamptz '{at}' - n * interval '1 minute'"


def _copy(
    cursor: CursorWrapper, table: str, row: str, times: int, changed: dict[str, str]
) -> None:
    """Copy a row; ``changed`` maps columns to SQL expressions of the copy's number ``n``.

    In them ``%%`` stands for a percent sign, as in every statement with parameters.
    """
    columns = [
        column.name for column in connection.introspection.get_table_description(cursor, table)
    ]
    expressions = {"id": f"'{_prefix(table)}' || n"} | changed
    quoted = [connection.ops.quote_name(name) for name in columns]
    values = [
        expressions.get(name, f"t.{mark}") for name, mark in zip(columns, quoted, strict=True)
    ]
    cursor.execute(
        f"with recursive many(n) as (select 1 union all select n + 1 from many where n < {times})"  # noqa: S608 -- no value of a user
        f" insert into {table} ({', '.join(quoted)}) select {', '.join(values)}"
        f" from many, {table} t where t.id = %s",
        [row],
    )


def _first_rows(team: Team, user: User) -> dict[str, str]:

    beat = beat_of(0, with_microbench=True).model_dump(mode="json")
    pool = Pool.objects.create(team=team, name="pool", slug="pool")
    host = Host.objects.create(
        team=team, pool=pool, name="node-0", slug="node-0", state=HostState.READY,
        last_seen_at=now() + timedelta(days=1), facts=facts_of(0).model_dump(mode="json"),
        microbench=beat["microbench"], last_beat=beat | {"microbench": None},
    )  # fmt: skip
    device = Device.objects.create(
        host=host, index=0, kind="cpu", uuid="cpu", name="bench", memory_bytes=2**34,
        hardware="hw-0",
    )  # fmt: skip
    plan = Plan.objects.create(
        team=team, owner=user, name="plan 0", state=PlanState.COMPUTED, verdict="fits",
        answer={"plans": [{"text": "x" * PLAN_BYTES}]},
    )  # fmt: skip
    job = Job.objects.create(
        team=team, owner=user, name="run 0", kind="train", model_name="demo", spec={},
        plan=plan, pool=pool, host=host, state=JobState.SUCCEEDED,
        estimate={"text": "x" * JOB_BYTES}, created_at=now(), queued_at=now(),
        started_at=now(), ended_at=now(),
    )  # fmt: skip
    attempt = Attempt.objects.create(job=job, number=1, host=host, fence="bench", ended_at=now())
    measurement = Measurement.objects.create(
        job=job, attempt=attempt, host=host, metric="tokens_per_second", unit="tokens/s",
        predicted=1.0, measured=1.1, ratio=1.1, measured_at=now(),
    )  # fmt: skip
    rows = {"host": host, "device": device, "plan": plan, "job": job, "attempt": attempt}
    return {name: str(row.pk) for name, row in {**rows, "measurement": measurement}.items()}


def names() -> list[str]:
    """Return the names of all figures: pages and the wizard's verdicts."""
    return [*PAGES, FIRST, *(f"verdict: {name}" for name in CASES)]


def seconds_of(waiting: Waiting) -> dict[str, float]:
    """Return the CPU time of each page and verdict.

    For pages it is the median without the first response.
    """
    client = Client(headers={"Host": "localhost"})
    client.force_login(User.objects.get(username=USER))
    paths = {page: path.format(**waiting._asdict()) for page, path in PAGES.items()}
    page_seconds = {page: _seconds(client, path) for page, path in paths.items()}
    return page_seconds | dict(verdict_seconds(client))


def _seconds(client: Client, path: str) -> float:
    seconds = []
    for _ in range(ROUNDS + 1):
        began = time.process_time()
        answer = client.get(path)
        seconds.append(time.process_time() - began)
        if answer.status_code != HTTPStatus.OK:
            raise RuntimeError(f"{path} answered {answer.status_code}")
    return median(seconds[1:])


def main(num_jobs: int) -> None:
    """Fill the site of ``SLIPWAY_DATA_DIR`` and print the CPU time of its pages as JSON."""
    migrate_databases()
    waiting = fill(num_jobs)
    sys.stdout.write(json.dumps(seconds_of(waiting)) + "\n")


# Benchmark of the CPU time of pages by number of jobs, on sites with a long history.
#
# Each size is a separate site, filled by SQL from one host, one plan and one job with documents of
# realistic size. Its pages are requested through Django in a separate process.


ROOT = Path(__file__).resolve().parents[2]
ASK = "from webapp.bench import long_history; long_history.main({})"
SIZES = (1_000, 10_000, 100_000)


def long_history_metrics(
    data: Path, sizes: Sequence[int] = SIZES
) -> Iterator[tuple[str, float, str]]:
    """Yield each page's CPU seconds at each size, and the exponent of their growth."""
    by_size = {size: _measured(data / str(size), size) for size in sizes}
    for page in names():
        for size in sizes:
            yield f"{page}, {size} jobs", by_size[size][page], "s"
        if len(sizes) > 1:
            growth = log(by_size[sizes[-1]][page] / by_size[sizes[0]][page])
            yield f"{page}: exponent of growth", growth / log(sizes[-1] / sizes[0]), ""


def _measured(data: Path, num_jobs: int) -> dict[str, float]:
    data.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", "django", "shell", "--no-imports", "-c", ASK.format(num_jobs)],
        cwd=ROOT,
        env=os.environ
        | {"SLIPWAY_DATA_DIR": str(data), "DJANGO_SETTINGS_MODULE": "webapp.settings"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


# The wizard's verdict: CPU time of the first one of a process, and of later ones.
#
# Each later verdict is for a workload that the process has not planned before, as when a user
# types another number.


SERVER = {"device": "h100-sxm-80gb", "devices_per_node": 8}


class Case(NamedTuple):
    """One draft, and the workload field that is changed."""

    preset: str
    model: str
    hardware: dict[str, Any]
    changed: str


CASES = {
    "serve 8B on an RTX 4090": Case(
        "serve", "meta-llama/Llama-3.1-8B", {"device": "rtx-4090"}, "concurrency"
    ),
    "serve 70B on 8 H100": Case("serve", "meta-llama/Llama-3.1-70B", SERVER, "concurrency"),
    "serve 405B on 16 H100": Case(
        "serve", "meta-llama/Llama-3.1-405B", SERVER | {"nodes": 2}, "concurrency"
    ),
    "fine-tune 8B on 8 H100": Case(
        "finetune", "meta-llama/Llama-3.1-8B", SERVER, "sequence_length"
    ),
}
FIRST = "the first verdict of a process"


def verdict_seconds(client: Client) -> Iterator[tuple[str, float]]:
    """Yield the CPU seconds of each verdict; for later ones, the median of ``ROUNDS``."""
    for number, (name, case) in enumerate(CASES.items()):
        plan = _draft_of(client, case)
        first, *later = [
            _verdict_seconds(client, plan, case, change) for change in range(ROUNDS + 1)
        ]
        if not number:
            yield FIRST, first
        yield f"verdict: {name}", median(later)


def _draft_of(client: Client, case: Case) -> Plan:
    location = client.get("/plans/new/")["Location"]
    plan = Plan.objects.get(pk=location.split("/")[2])
    goal_change(plan, case.preset)
    document = plan.document
    document.model = ModelChoice(source="catalog", catalog_id=case.model)
    document.hardware = HardwareChoice(**case.hardware)
    plan.document = document
    plan.save()
    return plan


def _verdict_seconds(client: Client, plan: Plan, case: Case, change: int) -> float:
    plan.refresh_from_db()
    form = step_form("workload", plan.document, options_for(plan))
    shown = {field.html_name: field.value() for field in form or ()}
    sent = {name: value for name, value in shown.items() if value is not None}
    sent[case.changed] = int(sent[case.changed]) + change + 1
    began = time.process_time()
    answer = client.post(
        f"/plans/{plan.pk}/verdict/?step=workload", sent, headers={"HX-Request": "true"}
    )
    elapsed = time.process_time() - began
    if answer.status_code != HTTPStatus.OK:
        raise RuntimeError(f"the verdict answered {answer.status_code}")
    return elapsed
