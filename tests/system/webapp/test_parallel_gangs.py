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


def contend() -> subprocess.CompletedProcess[str]:
    """Let all processes contend, and return what they wrote."""
    command = [sys.executable, "-m", "tests.webapp.queue.contender", str(PROCESSES), str(ROUNDS)]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"DATABASE_URL": database_url()},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def told(team, alice) -> list[str]:
    """What the contenders wrote, after all of them ended well."""
    for name in "ab":
        gpu_host(team, name, 16)
    Host.objects.update(last_seen_at=now() + timedelta(hours=1))  # nobody beats meanwhile
    assert Device.objects.filter(is_present=True).count() == 32
    done = contend()
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    return [line for line in lines if line.startswith("gang ")]


def test_gangs_in_parallel_get_all_or_nothing_and_leave_nothing_held(told):
    assert len(told) == PROCESSES * ROUNDS
    for line in told:
        _, _, _, wanted, _, held = line.split()
        assert held in {"0", wanted}, line
    assert any(not line.endswith(" 0") for line in told)
    assert not Allocation.objects.filter(released_at=None).exists()
    assert set(Job.objects.values_list("state", flat=True)) == {"stopped"}
