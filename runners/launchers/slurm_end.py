"""Prints as what Slurm ends the job that runs it: ``python -S -E runners/launchers/slurm_end.py``.

Standard library only: a node starts it by its path, without this package or any other installed.
"""

import os
import subprocess
import sys

TIMEOUT_SECONDS = 4.0  # below the supervisor's EXPLAIN_KILL_SECONDS, which then has the reason
ENDED = frozenset({"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL",
                   "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"})  # fmt: skip


def read_fields(text: str) -> dict[str, str]:
    """Return the NAME=VALUE fields of ``scontrol show ... --oneliner`` output."""
    return dict(word.partition("=")[::2] for word in text.split() if "=" in word)


def read_end(text: str) -> str:
    """Return the state in which Slurm ends a job, of ``scontrol show job --oneliner``, or "".

    While the processes of a preempted job end it is ``COMPLETING``; a time tells why.

    >>> read_end("JobId=7 JobState=COMPLETING PreemptTime=2026-12-01T03:25:31")
    'PREEMPTED'
    >>> read_end("JobId=7 JobState=RUNNING PreemptTime=None")
    ''
    """
    fields = read_fields(text)
    if fields.get("PreemptTime", "None") != "None":
        return "PREEMPTED"
    state = fields.get("JobState", "")
    return state if state in ENDED else ""


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
    if state := read_end(done.stdout):
        print(f"Slurm ended job {number} as {state}")
        return 0
    state = read_fields(done.stdout).get("JobState", "")
    told = f"Slurm says that job {number} is {state}"
    print(told if state else done.stderr.strip(), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
