"""Prints as what Slurm ends the job that runs it: ``python -S -E runners/launchers/slurm_end.py``.

The exit status is 0 if Slurm told it, ``RUNS_AGAIN`` if it has requeued the job, else 1.
Standard library only: a node starts it by its path, without this package or any other installed.
"""

import os
import subprocess
import sys
from collections.abc import Mapping

RUNS_AGAIN = os.EX_TEMPFAIL  # to the supervisor: no end, the job is run again
TIMEOUT_SECONDS = 4.0  # below the supervisor's EXPLAIN_KILL_SECONDS, which then has the reason
ENDED = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL",
                   "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"})  # fmt: skip


def read_fields(text: str) -> dict[str, str]:
    """Return the NAME=VALUE fields of ``scontrol show ... --oneliner`` output."""
    return dict(word.partition("=")[::2] for word in text.split() if "=" in word)


def read_end(text: str) -> str:
    """Return the state in which Slurm ends a job, of ``scontrol show job --oneliner``, or "".

    While the processes of a preempted job end it is ``COMPLETING``; a time tells why. The time
    outlives a requeue: only one since the start of this run is of this run.

    >>> run = "JobId=7 JobState=COMPLETING StartTime=2026-12-01T03:25:00 PreemptTime="
    >>> read_end(run + "2026-12-01T03:25:31"), read_end(run + "2026-12-01T03:21:07")
    ('PREEMPTED', '')
    """
    fields = read_fields(text)
    if _is_preempted(fields):
        return "PREEMPTED"
    state = fields.get("JobState", "")
    return state if state in ENDED else ""


def _is_preempted(fields: Mapping[str, str]) -> bool:
    """Return whether this run was preempted, by times of one clock in one form (ISO 8601).

    A requeued job has no start until it runs again: then the run that it had was preempted.
    """
    preempted, started = fields.get("PreemptTime", "None"), fields.get("StartTime", "Unknown")
    return preempted != "None" and (started == "Unknown" or preempted >= started)


def is_requeued(text: str, restarts: int) -> bool:
    """Return whether Slurm has requeued the run that was its job's so many restarts later.

    It counts the restart at once, while the run's processes still end.

    >>> is_requeued("JobId=7 JobState=COMPLETING Restarts=1", 0)
    True
    >>> is_requeued("JobId=7 JobState=CANCELLED Restarts=1", 1)
    False
    """
    counted = read_fields(text).get("Restarts", "")
    return counted.isdigit() and int(counted) > restarts


def main() -> int:
    """Print the state, if Slurm ends the job, else why it is not known; return the status."""
    number = os.environ["SLURM_JOB_ID"]
    try:
        done = subprocess.run(
            ["scontrol", "show", "job", number, "--oneliner"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        return 1
    if is_requeued(done.stdout, int(os.environ.get("SLURM_RESTART_COUNT", "0"))):
        print(f"Slurm requeued job {number}, which goes on when Slurm starts it again")
        return RUNS_AGAIN
    if state := read_end(done.stdout):
        print(f"Slurm ended job {number} as {state}")
        return 0
    state = read_fields(done.stdout).get("JobState", "")
    told = f"Slurm says that job {number} is {state}"
    print(told if state else done.stderr.strip(), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
