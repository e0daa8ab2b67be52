"""Runs the micro-benchmark as a low-priority child process and parses its output."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from runners import launch
from runners.facts import Microbench
from runners.slurm_options import SlurmConfig

# It runs in the host's folder, and measures the disk where jobs write.
COMMAND = (sys.executable, "-m", "runners.jobs.microbench", "--folder", ".")
TIMEOUT_SECONDS = 300.0
SLURM_PATIENCE_SECONDS = 200  # for a free node; otherwise retried later
RETRY_SECONDS = 600.0
LOW_PRIORITY = 10

log = logging.getLogger(__name__)


def command_for(slurm: SlurmConfig | None) -> Sequence[str]:
    """Return the benchmark's command; with Slurm it runs on a node, as jobs do."""
    if slurm is None:
        return COMMAND
    named = [f"SLURM_CONF={os.environ['SLURM_CONF']}"] if "SLURM_CONF" in os.environ else []
    cores = slurm.options.get("cpus-per-task", "1")
    return (
        "env", f"OMP_NUM_THREADS={cores}", *named,
        "srun", "--quiet", "--job-name=slipway-microbench", "--nodes=1", "--ntasks=1",
        f"--immediate={SLURM_PATIENCE_SECONDS}", "--time=5", *slurm.argv(), *COMMAND,
    )  # fmt: skip


class MicrobenchRunner:
    """Runs at most one benchmark at a time; callers must not run it in parallel with jobs."""

    def __init__(self, host_dir: Path, command: Sequence[str] = COMMAND) -> None:
        self._host_dir = host_dir
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0
        self._not_before = 0.0
        self.problem: str | None = None

    @property
    def is_running(self) -> bool:
        """Return whether a benchmark is running."""
        return self._child is not None

    def start(self) -> None:
        """Start a benchmark, unless one is running or failed recently."""
        if self._child or time.monotonic() < self._not_before:
            return
        self._child = subprocess.Popen(
            ["nice", "-n", str(LOW_PRIORITY), *self._command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=launch.render_env(self._host_dir, 1),
            cwd=self._host_dir,
            start_new_session=True,
        )
        self._deadline = time.monotonic() + TIMEOUT_SECONDS

    def retry(self) -> None:
        """Allow an immediate retry of a failed benchmark."""
        self._not_before = 0.0

    def cancel(self) -> None:
        """Kill a running benchmark: jobs have priority."""
        if self._child:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def poll(self) -> Microbench | None:
        """Return the result once after a successful benchmark, otherwise None."""
        child = self._child
        if child is None:
            return None
        if child.poll() is None:
            if time.monotonic() > self._deadline:
                self.cancel()
                self._fail(f"it took more than {TIMEOUT_SECONDS:.0f} s")
            return None
        output, errors = child.communicate()
        self._child = None
        return self._read(output, errors, child.returncode)

    def _read(self, output: bytes, errors: bytes, returncode: int) -> Microbench | None:
        lines = output.decode(errors="replace").strip().splitlines()
        try:
            result = Microbench.model_validate_json(lines[-1] if lines else "")
        except ValidationError:
            words = errors.decode(errors="replace").strip().splitlines()
            self._fail(words[-1] if words else f"exit code {returncode}, no result")
            return None
        self.problem = None
        return result

    def _fail(self, words: str) -> None:
        self._not_before = time.monotonic() + RETRY_SECONDS
        self.problem = f"the micro-benchmark failed: {words}"
        log.warning("%s", self.problem)
