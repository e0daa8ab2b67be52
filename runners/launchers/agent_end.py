"""Prints as what the host's agent knows that a job ends: ``python -S -E .../agent_end.py``.

It runs in the attempt's folder where the job ran, which cannot ask the scheduler itself, such as a
pod without an account. It asks the agent in files of that folder, which both see.
Standard library only, as ``slurm_end``. The exit status is 0 if the agent told why, else 1.
"""

import json
import sys
import time
from pathlib import Path

REQUEST_FILE, ANSWER_FILE = "end.asked", "end.json"  # files of the attempt's folder
TIMEOUT_SECONDS = 4.0  # below the supervisor's EXPLAIN_KILL_SECONDS, which then has the reason
POLL_SECONDS = 0.1


def read_answer(folder: Path) -> str | None:
    """Return what the agent told of the end, "" if it found nothing, None before it answers."""
    try:
        return str(json.loads((folder / ANSWER_FILE).read_text())["said"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def main() -> int:
    """Print the agent's words, or why there are none; return the status."""
    folder = Path.cwd()
    try:
        (folder / REQUEST_FILE).touch()
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while (said := read_answer(folder)) is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    if said:
        print(said)
        return 0
    silence = "the agent did not answer" if said is None else "the scheduler shows no reason"
    print(silence, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
