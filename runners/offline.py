"""What can be done with a host's attempts without its agent and without its server."""

import time
from collections.abc import Iterator

from runners.attempts import Verdict, attempt_folders
from runners.client import ServerClient
from runners.config import HostDir
from runners.messages import StopOrder
from runners.reasons import Reason
from runners.reconcile import Reconciler
from runners.supervision import procfs

STOP_ALL_SECONDS = 30.0
GRACE_SECONDS = 5.0


def stop_all(host_dir: HostDir, grace_seconds: float = GRACE_SECONDS) -> int:
    """Stop every running attempt, wait until none is left, and return how many there were."""
    if not host_dir.attempts.is_dir():
        return 0
    reconciler = Reconciler(
        host_dir, host_dir.config(), ServerClient("http://127.0.0.1"), boot_id=procfs.boot_id()
    )
    running = reconciler.running()
    for folder in running:
        order = StopOrder(
            attempt_id=folder.attempt_id,
            reason=Reason.STOPPED_BY_OPERATOR,
            grace_seconds=grace_seconds,
        )
        reconciler.stop(order)
    deadline = time.monotonic() + STOP_ALL_SECONDS
    while time.monotonic() < deadline and reconciler.running():
        time.sleep(0.05)
    return len(running)


def summaries(host_dir: HostDir) -> Iterator[str]:
    """Yield one line for each attempt on disk: its id, its state, and how it ended."""
    if not host_dir.attempts.is_dir():
        return
    boot_id = procfs.boot_id()
    for folder in attempt_folders(host_dir.attempts):
        verdict = folder.judge(boot_id)
        ended = folder.exit_record()
        how = f"  {ended.reason}" if ended and verdict is not Verdict.RUNNING else ""
        yield f"{folder.attempt_id}  {verdict}{how}"
