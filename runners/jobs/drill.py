"""Rehearse a job without a model: steps, figures and output, then the ending that was asked for.

An operator sees with it what a host and the pages do when jobs end badly, leave processes behind
or will not stop. It imports no torch and is through in the time that its steps take.
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

# What PyTorch says when a GPU's memory does not suffice; the supervisor knows it by this.
OOM_TEXT = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
PAGE_BYTES = 4096
# A process that left its session, its parent and every wish to listen to SIGTERM.
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
    """Run the drill whose attempt folder argv names."""
    run_job("drill", rehearse, prepare=lambda: None)


def rehearse(job: Job) -> None:
    """Do the steps, then end as asked."""
    spec = job.spec_of(DrillSpec)
    _obey_stop(job, spec)
    for _ in range(spec.daemons):
        subprocess.run([sys.executable, "-S", "-c", DAEMON], check=True)
    held = _hold(spec.memory_bytes)
    job.emitter.phase("Rehearsing")
    started = time.monotonic()
    for step in range(1, spec.steps + 1):
        _step(job, spec, step)
        job.stop_requested.wait(max(0.0, started + step * spec.step_seconds - time.monotonic()))
        if job.stop_requested.is_set():
            end_by_sigterm(job)
    _end(job, spec)
    del held


def _step(job: Job, spec: DrillSpec, step: int) -> None:
    job.emitter.metric({"loss": 1.0 / step}, step=step)
    job.emitter.progress(step, spec.steps, "steps", (spec.steps - step) * spec.step_seconds)
    job.emitter.say(f"step {step} of {spec.steps}")
    line = b"x" * 127 + b"\n"
    sys.stdout.buffer.write(line * (spec.log_bytes_per_step // len(line)))
    sys.stdout.buffer.flush()


def _hold(num_bytes: int) -> bytearray:
    """Return memory that is really taken: a byte of each page is written."""
    held = bytearray(num_bytes)
    for offset in range(0, num_bytes, PAGE_BYTES):
        held[offset] = 1
    return held


def _obey_stop(job: Job, spec: DrillSpec) -> None:
    def stop(_number: int, _frame: FrameType | None) -> None:
        if spec.forks_per_second:
            _fork_until_killed(spec.forks_per_second)
        if not spec.ignores_stop:
            job.stop_requested.set()

    signal.signal(signal.SIGTERM, stop)


def _fork_until_killed(per_second: int) -> NoReturn:
    """Start processes that leave parent and session, until the supervisor ends all of them."""
    while True:
        with contextlib.suppress(OSError):  # the machine takes no more: that too is a drill
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
        raise MissingModelError("the drill was asked to end as if its model were not here")
    if spec.ending == "oom_gpu":
        sys.stderr.write(f"{OOM_TEXT}\n")
        sys.exit(1)
    if spec.ending == "signal":
        with contextlib.suppress(OSError):  # KILL has no other meaning anyway
            signal.signal(spec.signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), spec.signal_number)
    sys.exit(spec.exit_code)


if __name__ == "__main__":
    main()
