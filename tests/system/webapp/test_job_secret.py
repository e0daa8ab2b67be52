"""A job with a secret of its team, from the launch form of a real `up` to a real agent's job."""

import re
from pathlib import Path

import psutil
import pytest

from tests.stack import HOST_SLUG, ApiClient, free_port, wait_for
from tests.system.running_up import RunningUp, command_of, spare_the_benchmark

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
SECRET, CANARY = "HF_TOKEN", "hf_canary_Zq7Lw3Ne"
OPTIONS = {
    "name": "Walked", "priority": "low", "max_retries": "1", "max_duration_seconds": "0.5",
    "secrets": SECRET,
}  # fmt: skip


def sees_the_secret() -> bool:
    """Return whether a job's process has the path of a file with the secret's value."""
    for process in psutil.process_iter():
        try:
            path = process.environ().get(f"{SECRET}_FILE", "")
            if path and Path(path).read_text("utf-8") == CANARY:
                return "runners.jobs" in command_of(process)
        except (psutil.Error, OSError):
            continue
    return False


def test_the_job_reads_the_secret_and_no_log_or_file_keeps_it(tmp_path):
    running = RunningUp(tmp_path / "data", free_port(), SLIPWAY_DEMO_SECONDS="6")
    try:
        spare_the_benchmark(running.wait_until_ready())
        (password,) = re.findall(r"password[: ]+(\S{12,})", running.words)
        admin = ApiClient(running.port, "admin", password)
        admin.choose_password(password)
        wait_for(lambda: "Ready" in admin.get(f"/hosts/{HOST_SLUG}/"), "a ready host")
        admin.post("/settings/secrets/save/", {"name": SECRET, "value": CANARY})
        _, headers, _ = admin.request("GET", "/plans/new/?preset=demo")
        plan = headers["Location"].split("/")[2]

        _, where = admin.post(f"/plans/{plan}/launch/", {"run": "job", **OPTIONS})
        job = where.split("/")[2]
        wait_for(sees_the_secret, "the file of the secret in the job's environment", every_s=0.1)

        assert admin.wait_for_state(job) == "succeeded"
        assert CANARY not in admin.get(f"/api/v1/jobs/{job}/log")
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert not [path for path in files if CANARY.encode() in path.read_bytes()]
    finally:
        running.end_by_force()
