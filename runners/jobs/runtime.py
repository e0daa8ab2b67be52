"""Start and end of every job process: its folders, threads, quiet libraries, exit codes."""

import errno
import os
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from runners.jobs.events import Emitter
from runners.jobs.restarts import EndsAgainError, end_as_before, note_end
from runners.jobspec import JobSpec
from runners.messages import RunRequest

HOST_DIR_VARIABLE = "SLIPWAY_HOST_DIR"
EXIT_BAD_INPUT = 3
NO_SPACE = os.strerror(errno.ENOSPC)
PEERS_STOP_SECONDS = 30.0  # a stop reaches the hosts of a job one after the other
Spec = TypeVar("Spec", bound=BaseModel)


class BadInputError(EndsAgainError):
    """The job cannot run as asked; the message names what, and the way out."""

    prefix = "BAD_INPUT"


class MissingModelError(BadInputError):
    """A model or data that the spec names is not on this host."""

    prefix = "MODEL_OR_DATA_MISSING"


class DiskFullError(BadInputError):
    """The host's disk became full while the job wrote."""

    prefix = "DISK_FULL"


@dataclass(frozen=True)
class Job:
    """One attempt as its process sees it."""

    attempt_dir: Path
    host_dir: Path
    request: RunRequest
    emitter: Emitter
    stop_requested: threading.Event

    @property
    def spec(self) -> JobSpec:
        """Return what the job was asked to do."""
        return self.request.spec

    def spec_of(self, kind: type[Spec]) -> Spec:
        """Return the spec as one of a kind; raise BadInputError when it is of another."""
        spec = self.spec
        if not isinstance(spec, kind):
            msg = f"kind '{spec.kind}' is not '{kind.model_fields['kind'].default}'"
            raise BadInputError(msg)
        return spec

    @property
    def checkpoint_dir(self) -> Path:
        """Return the folder of checkpoints, which survives a restart of the attempt."""
        return self._folder("checkpoint")

    @property
    def cache_dir(self) -> Path:
        """Return the host's folder of data that any job can rebuild."""
        path = self.host_dir / "cache"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def output_dir(self, name: str) -> Path:
        """Return the folder of one artefact."""
        return self._folder("output") / name

    def scratch_dir(self) -> Path:
        """Return a folder for files that do not outlive the job."""
        return self._folder("scratch")

    def clear_unfinished(self) -> None:
        """Delete what is only half written: scratch files, and folders that nobody renamed in."""
        shutil.rmtree(self.attempt_dir / "scratch", ignore_errors=True)
        for path in self.attempt_dir.glob("*/.*-building"):
            shutil.rmtree(path, ignore_errors=True)

    def _folder(self, name: str) -> Path:
        path = self.attempt_dir / name
        path.mkdir(parents=True, exist_ok=True)
        return path


def run_job(
    kind: str, work: Callable[[Job], None], prepare: Callable[[], None] | None = None
) -> None:
    """Run ``work`` on the attempt folder in argv and exit: 0 done, 3 bad input."""
    (prepare or prepare_process)()
    try:
        job = open_job(Path(_only_argument(kind)), kind)
        end_as_before(job.attempt_dir, EXIT_BAD_INPUT)
        try:
            carry_out(job, work)
        finally:
            job.emitter.close()
    except BadInputError as error:
        sys.stderr.write(f"{error.prefix}: {error}\n")
        sys.exit(EXIT_BAD_INPUT)


def carry_out(job: Job, work: Callable[[Job], None]) -> None:
    """Do a job's work; where it cannot be done as asked, nothing half written stays.

    Raises:
        BadInputError: it cannot run as asked.
        DiskFullError: the disk became full.
    """
    try:
        work(job)
    except BadInputError as error:
        job.clear_unfinished()
        note_end(job.attempt_dir, error)
        raise
    except Exception as error:
        full = disk_full(error, job.attempt_dir)
        if full is None:
            note_end(job.attempt_dir, error)
            raise
        job.clear_unfinished()
        raise full from error


def disk_full(error: Exception, folder: Path) -> DiskFullError | None:
    """Return a full disk's error where one was the cause, in whatever words a library told it."""
    if NO_SPACE not in str(error):
        return None
    free = shutil.disk_usage(folder).free
    return DiskFullError(
        f"{NO_SPACE}: {free} bytes are free where {folder} lies; free some space on the host, "
        "then clone the job"
    )


def prepare_process() -> None:
    """Fix the number of threads before torch works, and silence warnings."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(num_threads()))
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(num_threads())


def num_threads() -> int:
    """Return the threads a job may use: ``OMP_NUM_THREADS``, else every core it may run on."""
    configured = os.environ.get("OMP_NUM_THREADS", "")
    if configured.isdigit() and int(configured) > 0:
        return int(configured)
    return len(os.sched_getaffinity(0))


def open_job(attempt_dir: Path, kind: str) -> Job:
    """Return the job of an attempt folder.

    Raises:
        BadInputError: no readable spec.json, or one of another kind.
    """
    request = _read_request(attempt_dir / "spec.json")
    if request.spec.kind != kind:
        msg = f"{attempt_dir}/spec.json asks for kind '{request.spec.kind}', this is '{kind}'"
        raise BadInputError(msg)
    attempt_dir = attempt_dir.resolve()
    configured = os.environ.get(HOST_DIR_VARIABLE)
    host_dir = Path(configured) if configured else attempt_dir.parent.parent
    return Job(attempt_dir, host_dir, request, Emitter.from_environment(), threading.Event())


def checkpoint_on_sigterm(job: Job) -> None:
    """Turn SIGTERM into ``job.stop_requested``, so that the loop can save first."""
    signal.signal(signal.SIGTERM, lambda _signum, _frame: job.stop_requested.set())


def end_by_sigterm(job: Job) -> None:
    """Die by SIGTERM, so that whoever waits sees a stop and no success.

    Where another rank was told first, this one waits until its own supervisor says so too.
    """
    job.stop_requested.wait(PEERS_STOP_SECONDS)
    job.emitter.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _read_request(path: Path) -> RunRequest:
    try:
        return RunRequest.model_validate_json(path.read_bytes())
    except OSError as error:
        msg = f"cannot read {path}: {error.strerror}; give a folder that holds a spec.json"
        raise BadInputError(msg) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        msg = f"{path} is no valid run request: {field}: {first['msg']}"
        raise BadInputError(msg) from error


def _only_argument(kind: str) -> str:
    _program, *given = sys.argv
    if len(given) != 1:
        msg = f"usage: python -m runners.jobs.{kind} ATTEMPT_DIR"
        raise BadInputError(msg)
    return given[0]
