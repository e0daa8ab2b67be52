"""Writes a job's metrics to an experiment tracker, in a process with the tracker's library."""

import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from runners.environments.builder import Store
from runners.jobs.bound import bound
from runners.jobs.events import Emitter
from runners.jobs.runtime import BadInputError, Job, publish_folder
from runners.jobspec.trackers import TRACKERS, Tracker, TrackerOptions
from runners.launchers.attempts import DIRECTORY_VARIABLE
from runners.shared.config import HostDir
from runners.shared.environment import tracker_variables
from runners.supervision.procfs import MARKER

PROGRAM = Path(__file__).with_name("tracker_program.py")
NAME = "tracking"  # of the artefact
RANK = "RANK"  # that torchrun sets
# The attempt's mark is among them: who cleans up after the attempt finds the process by it.
PASSED_VARIABLES = (
    "PATH", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", MARKER,
)  # fmt: skip
START_SECONDS = 60.0  # to reach a server, too
FINISH_SECONDS, STOP_SECONDS = 30.0, 3.0  # to send what is left
ANSWER_BYTES = 1 << 14


@contextmanager
def tracked(
    job: Job, options: TrackerOptions | None, settings: Mapping[str, Any]
) -> Iterator[None]:
    """Write the job's metrics and figures to a tracker while the block runs.

    A tracker that does not start ends the job; one that fails later does not. A rank that is not
    the first writes nothing.

    Raises:
        BadInputError: the tracker does not start; the text has its library's reason.
    """
    network = _taken_network()
    if options is None or os.environ.get(RANK, "0") != "0":
        yield
        return
    tracker = TRACKERS[options.name]
    building = job.output_dir(".tracker-building")
    files = building / "files"
    files.mkdir(parents=True, exist_ok=True)
    process = _started(job, tracker, building, network)
    assert process.stdin is not None  # noqa: S101 - pipes were asked for
    assert process.stdout is not None  # noqa: S101
    try:
        url = _start_reply(process, tracker, _run_settings(job, options, files, settings))
        facts = {"tracker": tracker.name, "title": tracker.title, "url": url}
        facts |= {"project": options.project, "run": options.run_name or job.request.job_id}
        publish_folder(job, NAME, "report", lambda folder: _note(folder, facts), facts)
        job.emitter.tracker = Emitter(os.dup(process.stdin.fileno()), owns_fd=True)
        process.stdin.close()  # the emitter's own end is the last one
        job.emitter.before_close = lambda: _end(job, process, tracker, STOP_SECONDS)
        job.emitter.log(f"metrics are also written to {tracker.title}{f': {url}' if url else ''}")
        yield
        _end(job, process, tracker, FINISH_SECONDS)
        publish_folder(job, NAME, "report", lambda folder: _move(files, folder, facts), facts)
        shutil.rmtree(building, ignore_errors=True)
    finally:
        _kill(process)
        process.stdout.close()
        with suppress(BrokenPipeError):  # of what it did not read
            process.stdin.close()


def _taken_network() -> dict[str, str]:
    """Take the proxies and certificates of a tracker out of the job's own environment."""
    return {name: os.environ.pop(name) for name in tracker_variables() if name in os.environ}


def _started(
    job: Job, tracker: Tracker, home: Path, network: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the process; the environment was built before the job's program began."""
    store = Store(HostDir(job.host_dir))
    env = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
    return subprocess.Popen(
        bound([str(store.python(store.pins(tracker.name))), "-P", str(PROGRAM)]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=home,
        env={**env, **network, "HOME": str(home)},
        start_new_session=True,
    )


def _run_settings(
    job: Job, options: TrackerOptions, folder: Path, settings: Mapping[str, Any]
) -> dict[str, Any]:
    job_id = job.request.job_id
    plain = {
        name: value
        for name, value in settings.items()
        if isinstance(value, str | int | float) and value != ""
    }
    return {
        **options.model_dump(),
        "run_name": options.run_name or job_id,
        "job": job_id,
        "folder": str(folder),
        "settings": plain,
        "secrets": _secrets(TRACKERS[options.name]),
    }


def _secrets(tracker: Tracker) -> dict[str, str]:
    """Return the value of the tracker's secret by its name, if the job was given it."""
    path = Path(os.environ.get(DIRECTORY_VARIABLE, "")) / tracker.secret
    return {tracker.secret: path.read_text()} if tracker.secret and path.is_file() else {}


def _start_reply(
    process: subprocess.Popen[bytes], tracker: Tracker, options: dict[str, Any]
) -> str:
    """Return the address of the run, empty where its files alone have it.

    Raises:
        BadInputError: the library refuses, or is late.
    """
    assert process.stdin is not None  # noqa: S101 - pipes were asked for
    assert process.stdout is not None  # noqa: S101
    with suppress(BrokenPipeError):  # it has ended, as its answer says
        process.stdin.write(json.dumps(options).encode() + b"\n")
        process.stdin.flush()
    where = f" at {options['url']}" if options["url"] else ""
    deadline, read = time.monotonic() + START_SECONDS, b""
    while b"\n" not in read:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
            raise BadInputError(
                f"{tracker.title}{where} did not answer within {START_SECONDS:g} s; check the "
                "address, or launch the job without a tracker"
            )
        if not (piece := os.read(process.stdout.fileno(), ANSWER_BYTES)):
            read = b'{"error": "its process ended"}\n'
        read += piece
    answer = json.loads(read)
    if "error" in answer:
        secret = f" and the team's secret {tracker.secret}" if tracker.secret else ""
        raise BadInputError(
            f"{tracker.title}{where} refuses: {answer['error']}; check the address{secret}, or "
            "launch the job without a tracker"
        )
    return str(answer["url"])


def _end(job: Job, process: subprocess.Popen[bytes], tracker: Tracker, seconds: float) -> None:
    """Let the process write what is left, unless it did; kill it if it is late.

    The emitter's writer closes the pipe after its last line. It is blocked while the process does
    not read, and goes on when that is dead.
    """
    sink, job.emitter.tracker = job.emitter.tracker, None
    if sink is None:
        return
    deadline = time.monotonic() + seconds
    sink.close(seconds)
    try:
        status = process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        status = _kill(process)
        sink.close(STOP_SECONDS)
    if status:
        job.emitter.log(
            f"{tracker.title} did not get everything: its process ended with {status}; the "
            "site has all metrics"
        )


def _kill(process: subprocess.Popen[bytes]) -> int:
    """Kill the process, unless it has ended, and those that it started; return its status."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _note(folder: Path, facts: Mapping[str, Any]) -> None:
    (folder / f"{NAME}.json").write_text(json.dumps(facts, indent=1))


def _move(files: Path, folder: Path, facts: Mapping[str, Any]) -> None:
    """Move what the library wrote to the artefact, beside the note."""
    _note(folder, facts)
    for path in files.iterdir():
        path.rename(folder / path.name)
