"""Runs the endpoint under load: a serving job as a child process on the loopback."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn

from runners.jobs.events import EVENT_FD_VARIABLE
from runners.jobs.isolation import die_as
from runners.jobs.runtime import HOST_DIR_VARIABLE, Job
from runners.jobspec import START_SECONDS, ServeSpec
from runners.messages import EndpointBody, MetricPoint

STOP_SECONDS = 60.0
LOST_SECONDS = 180.0  # an endpoint whose job has ended stops by itself


class OwnEndpoint:
    """One endpoint process and its reported events."""

    def __init__(self, job: Job, spec: ServeSpec) -> None:
        self._job = job
        self.measured: dict[str, float] = {}
        self.address: EndpointBody | None = None
        self._has_reported = threading.Event()  # its address arrived, or its event stream ended
        self._process, pipe = _start_process(job, spec)
        self._reader = threading.Thread(target=self._read_events, args=(pipe,), daemon=True)
        self._reader.start()

    def is_alive(self) -> bool:
        """Return whether its process runs."""
        return self._process.poll() is None

    def wait_until_ready(self) -> EndpointBody:
        """Return its address; if it fails to start, end this process in the same way.

        Raises:
            TimeoutError: the endpoint neither became ready nor ended.
        """
        if not self._has_reported.wait(START_SECONDS):
            self.kill()
            raise TimeoutError(f"the endpoint did not come up within {START_SECONDS:g} s")
        if self.address is None:
            self.die_with_it("the endpoint to be measured did not come up")
        return self.address

    def stop(self) -> None:
        """Terminate it and wait for its result."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()
        self._reader.join(STOP_SECONDS)

    def kill(self) -> None:
        """Kill it if it still runs."""
        if self.is_alive():
            self._process.kill()
        self._process.wait()

    def die_with_it(self, why: str) -> NoReturn:
        """Print the reason and end this process with the endpoint's signal or exit code."""
        code = self._process.wait(STOP_SECONDS)  # its pipe closes shortly before it ends
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        sys.stderr.write(f"ENDPOINT_ENDED: {why}: it ended by {how}\n")
        self._job.emitter.close()
        die_as(code)

    def _read_events(self, pipe: BinaryIO) -> None:
        """Read its events until its end; its metrics become the job's."""
        with pipe:
            for line in pipe:
                event = json.loads(line)
                self._handle_event(event["kind"], event["body"])
        self._has_reported.set()

    def _handle_event(self, kind: str, body: dict[str, Any]) -> None:
        if kind == "endpoint":
            self.address = EndpointBody.model_validate(body)
            self._has_reported.set()
        elif kind == "metric":
            point = MetricPoint.model_validate(body)
            self._job.emitter.metric(point.values, source=point.source)
        elif kind == "result":
            self.measured = body["measured"]


@contextlib.contextmanager
def own_endpoint(job: Job, spec: ServeSpec) -> Iterator[OwnEndpoint]:
    """Run an endpoint while the block runs, and kill it afterwards."""
    endpoint = OwnEndpoint(job, spec)
    try:
        yield endpoint
    finally:
        endpoint.kill()


def _start_process(job: Job, spec: ServeSpec) -> tuple[subprocess.Popen[bytes], BinaryIO]:
    folder = job.scratch_dir() / "endpoint"
    folder.mkdir(exist_ok=True)
    spec = spec.model_copy(update={"idle_stop_seconds": LOST_SECONDS})
    request = job.request.model_copy(update={"spec": spec})
    (folder / "spec.json").write_text(request.model_dump_json())
    read_fd, write_fd = os.pipe()
    variables = {EVENT_FD_VARIABLE: str(write_fd), HOST_DIR_VARIABLE: str(job.host_dir)}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "runners.jobs.serve", str(folder)],
            env=os.environ | variables,
            pass_fds=[write_fd],
            stdin=subprocess.DEVNULL,
        )
    finally:
        os.close(write_fd)
    return process, os.fdopen(read_fd, "rb")
