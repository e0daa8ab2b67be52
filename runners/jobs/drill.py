"""Simulates a job without a model: steps, figures and output, then the requested ending.

An operator can test how a host and the pages handle jobs that fail, leave processes running or
ignore stop requests. It does not import torch.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

from runners.jobs.runtime import Job, MissingModelError, end_by_sigterm, run_job
from runners.jobspec import DrillSpec

# PyTorch's message for GPU out of memory, by which the supervisor classifies it.
OOM_TEXT = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
PAGE_BYTES = 4096
# A process that left its session and parent, and ignores SIGTERM.
DAEMON = (
    "import os, signal, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork(): os._exit(0)\n"
    "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "    time.sleep(3600)\n"
    "os._exit(0)\n"
)


def main() -> None:
    """Run the drill of the attempt folder in argv."""
    run_job("drill", rehearse, prepare=lambda: None)


def rehearse(job: Job) -> None:
    """Run the steps, then end as requested."""
    spec = job.spec_of(DrillSpec)
    _install_stop_handler(job, spec)
    for _ in range(spec.daemons):
        subprocess.run([sys.executable, "-S", "-c", DAEMON], check=True)
    memory = _hold(spec.memory_bytes)
    job.emitter.phase("Rehearsing")
    started = time.monotonic()
    for step in range(1, spec.steps + 1):
        _step(job, spec, step)
        job.stop_requested.wait(max(0.0, started + step * spec.step_seconds - time.monotonic()))
        if job.stop_requested.is_set():
            end_by_sigterm(job)
    _end(job, spec)
    del memory


def _step(job: Job, spec: DrillSpec, step: int) -> None:
    job.emitter.metric({"loss": 1.0 / step}, step=step)
    job.emitter.progress(step, spec.steps, "steps", (spec.steps - step) * spec.step_seconds)
    job.emitter.log(f"step {step} of {spec.steps}")
    line = b"x" * 127 + b"\n"
    sys.stdout.buffer.write(line * (spec.log_bytes_per_step // len(line)))
    sys.stdout.buffer.flush()


def _hold(num_bytes: int) -> bytearray:
    """Return allocated memory with one byte written per page."""
    memory = bytearray(num_bytes)
    for offset in range(0, num_bytes, PAGE_BYTES):
        memory[offset] = 1
    return memory


def _install_stop_handler(job: Job, spec: DrillSpec) -> None:
    def stop(_number: int, _frame: FrameType | None) -> None:
        if spec.forks_per_second:
            _fork_until_killed(spec.forks_per_second)
        if not spec.ignores_stop:
            job.stop_requested.set()

    signal.signal(signal.SIGTERM, stop)


def _fork_until_killed(per_second: int) -> NoReturn:
    """Start processes that leave parent and session until the supervisor kills all of them."""
    while True:
        with contextlib.suppress(OSError):  # the process limit is reached
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    threading.Event().wait()
                os._exit(0)
        time.sleep(1.0 / per_second)


def _end(job: Job, spec: DrillSpec) -> None:
    if spec.ending == "well":
        job.emitter.result({"steps": float(spec.steps)}, {"steps": "counted by the drill"})
        return
    job.emitter.close()
    if spec.ending == "missing_model":
        raise MissingModelError("the drill simulates a missing model")
    if spec.ending == "oom_gpu":
        sys.stderr.write(f"{OOM_TEXT}\n")
        sys.exit(1)
    if spec.ending == "signal":
        with contextlib.suppress(OSError):  # SIGKILL cannot be handled
            signal.signal(spec.signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), spec.signal_number)
    sys.exit(spec.exit_code)


if __name__ == "__main__":
    main()
