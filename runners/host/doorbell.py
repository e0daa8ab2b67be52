"""Runs the Celery worker that receives wake-up messages ("doorbells") as the agent's child.

The worker may die after a broker outage, a damaged message or kill -9. The agent restarts it;
heartbeats carry everything meanwhile.
"""

import sys
from collections.abc import Sequence

from runners.host.app import QUEUE
from runners.host.companions import ChildSupervisor
from runners.shared.config import HostDir
from runners.shared.timing import DOORBELL_STOP_SECONDS

COMMAND = (
    # In a container root is the only user; the worker accepts only JSON, which is not executable.
    sys.executable, "-W", "ignore:You're running the worker with superuser privileges",
    "-m", "celery", "-A", "runners.host.app", "--quiet", "worker", "-Q", QUEUE,
    "-c", "2", "--without-gossip", "--without-mingle", "--without-heartbeat",
    "--loglevel", "WARNING",
)  # fmt: skip


class DoorbellWorkerSupervisor(ChildSupervisor):
    """Keeps one worker running."""

    def __init__(self, host_dir: HostDir, command: Sequence[str] = COMMAND) -> None:
        super().__init__(host_dir, "the doorbell's worker", command, DOORBELL_STOP_SECONDS)
