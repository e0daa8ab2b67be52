"""The stop of ``up``: stop allocation, end this machine's jobs, report what remains.

The order matters. First the web process and the ticker stop, which allocate jobs and let hosts
claim them; the control worker stops dispatching but still stores reports. Then the jobs of this
machine are ended, which its agent reports over Redis. Everything else stops last.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from webapp.boot import console, processes

REPORT_SECONDS = 10.0
LOOK_S = 0.1
IMPATIENT = "you did not wait for it"


class Stopping:
    """The stop of one ``up``; ``hurries`` returns whether the user wants no more waiting."""

    def __init__(
        self,
        crew: processes.Crew,
        host: Path,
        environment: Mapping[str, str],
        hurries: Callable[[], bool],
    ) -> None:
        self._crew, self._host, self._hurries = crew, host, hurries
        self._environment = dict(environment)
        self._untold = False

    def stop(self, *, ends_jobs: bool) -> None:
        """Stop every part; with ``ends_jobs``, end this machine's jobs first."""
        lines = self._end_jobs() if ends_jobs and self._host.exists() else []
        self._crew.stop(hurry=self._hurries)
        for line in lines:
            console.line(f"  {line}")
        if running := self._running():
            how = ", which are stopping" if ends_jobs and not self._untold else ""
            console.line(f"  Stopped. Still running on this machine{how}: {', '.join(running)}")
        else:
            console.line("  Stopped; nothing is left running on this machine.")

    def _end_jobs(self) -> list[str]:
        """End this machine's jobs while their exits can still be stored; return report lines."""
        since = time.time()
        self._crew.signal("control", signal.SIGUSR1)
        self._crew.stop("web", "ticker", hurry=self._hurries)
        stop_all = ["-m", "runners", "stop-all", "--with-site", "--dir", str(self._host)]
        ended = self._run(*stop_all)
        if self._hurries():
            ended = self._run(*stop_all, "--no-wait", is_patient=True)
        self._untold = ended.returncode != 0
        options = ["--since", str(since), "--wait", str(REPORT_SECONDS)]
        report = self._run("manage.py", "remaining", *options)
        lines = report.stdout.splitlines()
        if report.returncode != 0:
            words = (report.stderr.strip().splitlines() or [IMPATIENT])[-1]
            lines = [f"What runs on other hosts or waits is not known: {words}"]
        return [*ended.stderr.splitlines(), *lines]

    def _running(self) -> list[str]:
        """Return the ids of attempts that are still running on this machine."""
        if not self._host.exists():
            return []
        done = self._run("-m", "runners", "status", "--dir", str(self._host), is_patient=True)
        rows = [line.split() for line in done.stdout.splitlines()]
        return [row[0] for row in rows if row[1:2] == ["running"]]

    def _run(
        self, *arguments: str, is_patient: bool = False
    ) -> "subprocess.CompletedProcess[str]":
        """Run a Python program to its end, or kill it if the user hurries."""
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        while True:
            try:
                output, errors = process.communicate(timeout=LOOK_S)
            except subprocess.TimeoutExpired:
                if self._hurries() and not is_patient:
                    process.kill()
                continue
            return subprocess.CompletedProcess(process.args, process.returncode, output, errors)
