"""Runs a stage and ends its whole process tree: ``python -S -E reaper.py SCRATCH COMMAND...``.

The tree ends when the stage ends, when SIGTERM arrives, and when standard input closes, which the
kernel does if the validation's command dies, also by SIGKILL. Processes that left their session or
parent belong to the tree, because this process is their subreaper. Then it removes the scratch
folder and ends as the stage did.

Standard library only: it starts in some hundredths of a second.
"""

import os
import resource
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

if __name__ == "__main__":  # -S hides site-packages and this package
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from runners.shared.timing import LOCK_PROBE_SECONDS
from runners.supervision import child
from runners.supervision.child import die_with

LOCK = ".proof.lock"  # a living process holds it: in the output folder, in each scratch folder
WORK = "work"  # the stage's own part of the scratch folder
EXIT_NOT_STARTED = 127
LONGEST_PAUSE_SECONDS = 0.5  # a driver may hold a process


class Reaper:
    """The stage's process, and the wait status with which it ended."""

    def __init__(self) -> None:
        self.status: int | None = None
        self._is_stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        self._woken, wake = os.pipe()
        for end in (self._woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def _stop(self, *_: object) -> None:
        self._is_stopped = True

    def start(self, argv: Sequence[str]) -> None:
        """Start the stage, which dies with this process.

        Raises:
            OSError: the program cannot be executed.
        """
        child.become_subreaper()
        reaper = os.getpid()
        # Kept: at its deletion, Popen would take the status of a stage that has ended already.
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: die_with(reaper),  # noqa: PLW1509 - this process has one thread
        )
        # The command reads to the end of the stage's output, which this process must not hold.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)

    def wait(self) -> None:
        """Wait until the stage ends, SIGTERM arrives or standard input closes."""
        poller = select.poll()
        stdin = sys.stdin.fileno()
        for fd in (stdin, self._woken):
            poller.register(fd, select.POLLIN)
        self.reap()
        while self.status is None and not self._is_stopped:
            ready = {fd for fd, _ in poller.poll()}
            if self._woken in ready:
                os.read(self._woken, select.PIPE_BUF)
            if stdin in ready:
                return
            self.reap()

    def reap(self) -> None:
        """Wait for the children that ended, and keep the stage's status."""
        while ended := child.wait_any():
            pid, status, _ = ended
            if self._process is not None and pid == self._process.pid:
                self.status = status


def main(scratch: Path, argv: Sequence[str]) -> None:
    """Run the command, end its tree, remove the scratch folder and end as the command did."""
    reaper = Reaper()
    with ExitStack() as stack:
        with suppress(OSError):  # a file system without locks
            stack.enter_context(child.locked(scratch / LOCK, LOCK_PROBE_SECONDS))
        try:
            reaper.start(argv)
        except OSError as error:
            sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
            shutil.rmtree(scratch, ignore_errors=True)
            sys.exit(EXIT_NOT_STARTED)
        reaper.wait()
        child.kill_tree(reaper.reap, LONGEST_PAUSE_SECONDS)
        shutil.rmtree(scratch, ignore_errors=True)
    status = reaper.status
    code = os.waitstatus_to_exitcode(status) if status is not None else -signal.SIGKILL
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the stage may have left its own
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
