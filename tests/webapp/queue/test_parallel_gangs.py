"""Eight processes that want gangs of 32 devices at the same time."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from django.db import connection

from tests.webapp.queue.conftest import gpu_host
from webapp.core.clock import now
from webapp.hosts.models import Device, Host
from webapp.jobs.models import Allocation, Job

pytestmark = [pytest.mark.django_db(transaction=True, databases="__all__"), pytest.mark.slow]
PROCESSES, ROUNDS = 8, 8
ROOT = Path(__file__).parents[3]


def database_url() -> str:
    """Return where the test's own database is."""
    parts = connection.settings_dict
    if connection.vendor == "sqlite":
        return f"sqlite:///{parts['NAME']}"
    user = f"{parts['USER']}:{parts['PASSWORD']}@" if parts["USER"] else ""
    return f"postgresql://{user}{parts['HOST']}:{parts['PORT'] or 5432}/{parts['NAME']}"


def contenders() -> list[subprocess.Popen[str]]:
    environment = os.environ | {"DATABASE_URL": database_url()}
    command = [sys.executable, "-m", "tests.webapp.queue.contender"]
    return [
        subprocess.Popen(
            [*command, str(seed), str(ROUNDS)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(PROCESSES)
    ]


@pytest.fixture
def told(team, alice) -> list[str]:
    """What the contenders wrote, after all of them ended well."""
    for name in "ab":
        gpu_host(team, name, 16)
    Host.objects.update(last_seen_at=now() + timedelta(hours=1))  # nobody beats meanwhile
    assert Device.objects.filter(is_present=True).count() == 32
    running = contenders()
    outcomes = [process.communicate(timeout=240) for process in running]
    assert [process.returncode for process in running] == [0] * PROCESSES, outcomes
    lines = [line for out, _ in outcomes for line in out.splitlines()]
    return [line for line in lines if line.startswith("gang ")]


def test_gangs_in_parallel_get_all_or_nothing_and_leave_nothing_held(told):
    assert len(told) == PROCESSES * ROUNDS
    for line in told:
        _, _, _, wanted, _, held = line.split()
        assert held in {"0", wanted}, line
    assert any(not line.endswith(" 0") for line in told)
    assert not Allocation.objects.filter(released_at=None).exists()
    assert set(Job.objects.values_list("state", flat=True)) == {"stopped"}
