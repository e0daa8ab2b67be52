"""The types of the Python client, as mypy shows them to its users."""

import subprocess
import sys
from pathlib import Path

import pytest

# In strict mode an ignored error that does not occur is an error, too.
SCRIPT = """
from collections.abc import Iterator
from typing import assert_type

from runners.client import AsyncSlipway, Event, Slipway
from runners.client.generated import JobDetail, JobPage, JobReply, QuotaChanges


def blocking(client: Slipway) -> None:
    assert_type(client.get_job("x"), JobDetail)
    assert_type(client.get_job(job_id="x").state, str)
    assert_type(client.list_jobs(limit=3).items[0], JobReply)
    assert_type(client.delete_job("x", idempotency_key="k"), None)
    assert_type(client.follow_job("x", rank=1), Iterator[Event])
    client.change_limits(QuotaChanges(max_devices=None))
    client.change_limits({"max_devices": 1})
    client.get_job()  # type: ignore[call-arg]
    client.get_job(1)  # type: ignore[arg-type]
    client.list_jobs(stat="")  # type: ignore[call-arg]
    QuotaChanges(max_device=1)  # type: ignore[typeddict-unknown-key]


async def awaited(client: AsyncSlipway) -> None:
    assert_type(await client.get_job("x"), JobDetail)
    assert_type((await client.get_job(job_id="x")).state, str)
    assert_type(await client.list_jobs(limit=3), JobPage)
    assert_type(await client.delete_job("x", idempotency_key="k"), None)
    async for event in client.follow_job("x", rank=1):
        assert_type(event, Event)
    client.get_job("x").state  # type: ignore[attr-defined]
    await client.get_job()  # type: ignore[call-arg]
    await client.list_jobs(stat="")  # type: ignore[call-arg]
"""


@pytest.mark.slow  # mypy reads the client and all that it imports
def test_both_halves_show_the_types_of_arguments_and_replies(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    cache = f"--cache-dir={tmp_path / 'cache'}"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", cache, str(script)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
