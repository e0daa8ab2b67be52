"""The endpoint under load: a serving job's own process on the loopback, a child of ours."""

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
LOST_SECONDS = 180.0  # an endpoint whose job is gone ends by itself


class OwnEndpoint:
    """One endpoint process, and what it told so far."""

    def __init__(self, job: Job, spec: ServeSpec) -> None:
        self._job = job
        self.measured: dict[str, float] = {}
        self.address: EndpointBody | None = None
        self._is_told = threading.Event()  # its address, or that it has nothing more to tell
        self._process, pipe = _started(job, spec)
        self._reader = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._reader.start()

    def is_alive(self) -> bool:
        """Tell whether its process runs."""
        return self._process.poll() is None

    def wait_until_ready(self) -> EndpointBody:
        """Return where it answers; end as it ended where it did not come up.

        Raises:
            TimeoutError: it neither answers nor ends.
        """
        if not self._is_told.wait(START_SECONDS):
            self.kill()
            raise TimeoutError(f"the endpoint did not come up within {START_SECONDS:g} s")
        if self.address is None:
            self.die_with_it("the endpoint to be measured did not come up")
        return self.address

    def stop(self) -> None:
        """Tell it to end, and wait until it has left its own figures."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        self.kill()
        self._reader.join(STOP_SECONDS)

    def kill(self) -> None:
        """End it now, if it still runs."""
        if self.is_alive():
            self._process.kill()
        self._process.wait()

    def die_with_it(self, why: str) -> NoReturn:
        """Say why, and end as it ended: by its signal, or with its exit code."""
        code = self._process.wait(STOP_SECONDS)  # its pipe closes a moment before it is gone
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        sys.stderr.write(f"ENDPOINT_ENDED: {why}: it ended by {how}\n")
        self._job.emitter.close()
        die_as(code)

    def _read(self, pipe: BinaryIO) -> None:
        """Take what it tells until its end; its charts become the job's own."""
        with pipe:
            for line in pipe:
                event = json.loads(line)
                self._take(event["kind"], event["body"])
        self._is_told.set()

    def _take(self, kind: str, body: dict[str, Any]) -> None:
        if kind == "endpoint":
            self.address = EndpointBody.model_validate(body)
            self._is_told.set()
        elif kind == "metric":
            point = MetricPoint.model_validate(body)
            self._job.emitter.metric(point.values, source=point.source)
        elif kind == "result":
            self.measured = body["measured"]


@contextlib.contextmanager
def own_endpoint(job: Job, spec: ServeSpec) -> Iterator[OwnEndpoint]:
    """Run an endpoint while the block runs; afterwards there is none."""
    endpoint = OwnEndpoint(job, spec)
    try:
        yield endpoint
    finally:
        endpoint.kill()


def _started(job: Job, spec: ServeSpec) -> tuple[subprocess.Popen[bytes], BinaryIO]:
    folder = job.scratch_dir() / "endpoint"
    folder.mkdir(exist_ok=True)
    spec = spec.model_copy(update={"idle_stop_seconds": LOST_SECONDS})
    request = job.request.model_copy(update={"spec": spec})
    (folder / "spec.json").write_text(request.model_dump_json())
    reading, writing = os.pipe()
    ours = {EVENT_FD_VARIABLE: str(writing), HOST_DIR_VARIABLE: str(job.host_dir)}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "runners.jobs.serve", str(folder)],
            env=os.environ | ours,
            pass_fds=[writing],
            stdin=subprocess.DEVNULL,
        )
    finally:
        os.close(writing)
    return process, os.fdopen(reading, "rb")
