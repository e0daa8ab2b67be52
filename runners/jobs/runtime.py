"""What every job does: its folder, threads, telemetry, artefacts, end."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from runners.devices import amd
from runners.jobs.energy import EnergyMeter, Sample, visible_sample, zones
from runners.jobs.events import Emitter
from runners.jobspec import JobSpec
from runners.shared.kinds import ArtefactKind
from runners.shared.messages import GANG_VARIABLE, ArtefactBody, Gang, RunRequest
from runners.shared.timing import PEERS_STOP_SECONDS
from runners.supervision import classification
from runners.supervision.child import compiler_name

# ---------------------------------------------------------------------------
# Start and end of job processes: folders, threads, compiler cache, warnings, exit codes.
# ---------------------------------------------------------------------------


# Prevents torchrun restarts after permanent errors.
#
# torchrun restarts every rank after any failure. Bad input, a diverged training or insufficient
# memory would fail again: the rank records the error, and restarted ranks of the same attempt exit
# with it at once.


COUNT_VARIABLE = "TORCHELASTIC_RESTART_COUNT"
NOTE = "ends-again.txt"


class EndsAgainError(Exception):
    """A permanent error, which would recur after a restart."""

    prefix = ""


def note_end(folder: Path, error: Exception) -> None:
    """Record a permanent error for restarted ranks; does nothing without torchrun."""
    if COUNT_VARIABLE not in os.environ:
        return
    named = getattr(error, "prefix", "") or f"{type(error).__module__}.{type(error).__qualname__}"
    message = f"{named}: {error}"
    has_no_memory = classification.GPU.search(message) or classification.HOST.search(message)
    if isinstance(error, EndsAgainError) or has_no_memory:
        (folder / NOTE).write_text(message)


def end_as_before(folder: Path, code: int) -> None:
    """Exit with the recorded error of an earlier rank of this attempt, if there is one."""
    path = folder / NOTE
    if os.environ.get(COUNT_VARIABLE, "0") != "0" and path.exists():
        sys.stderr.write(f"{path.read_text()}\n")
        sys.exit(code)


HOST_DIR_VARIABLE = "SLIPWAY_HOST_DIR"
EXIT_BAD_INPUT = 3
# What the system says of a disk or a quota that is full, and what the message adds.
FULL = {
    os.strerror(errno.ENOSPC): "free some space on the host",
    os.strerror(errno.EDQUOT): "the account that Slipway runs as may store no more there: delete "
    "some of its files, or have its quota raised",
}
Spec = TypeVar("Spec", bound=BaseModel)


class BadInputError(EndsAgainError):
    """The job's input is invalid; the message names the problem and the remedy."""

    prefix = "BAD_INPUT"


class MissingModelError(BadInputError):
    """A model or data that the spec names is not on this host."""

    prefix = "MODEL_OR_DATA_MISSING"


class DiskFullError(BadInputError):
    """The host's disk, or the account's quota on it, became full while the job wrote."""

    prefix = "DISK_FULL"


@dataclass(frozen=True)
class Job:
    """One attempt within its job process."""

    attempt_dir: Path
    host_dir: Path
    request: RunRequest
    emitter: Emitter
    stop_requested: threading.Event

    @property
    def owns_folder(self) -> bool:
        """Return whether no other node, which has the lead rank, writes the attempt's folder."""
        gang = self.request.gang
        return GANG_VARIABLE not in os.environ or gang is None or gang.node_rank == 0

    @property
    def spec(self) -> JobSpec:
        """Return the job's spec."""
        return self.request.spec

    def spec_of(self, kind: type[Spec]) -> Spec:
        """Return the spec if it has the given type; otherwise raise BadInputError."""
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
        """Return the host's cache folder; any job can rebuild its content."""
        path = self.host_dir / "cache"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def output_dir(self, name: str) -> Path:
        """Return the folder of one artefact."""
        return self._folder("output") / name

    def scratch_dir(self) -> Path:
        """Return a folder for temporary files of the job."""
        return self._folder("scratch")

    def clear_unfinished(self) -> None:
        """Delete unfinished output: scratch files, and folders that were not published."""
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
    """Run a job's work; on bad input or a full disk delete unfinished output.

    Raises:
        BadInputError: the input is invalid.
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
    """Return a DiskFullError if a full disk or quota caused the error, else None."""
    said = next((text for text in FULL if text in str(error)), None)
    if said is None:
        return None
    free = shutil.disk_usage(folder).free
    return DiskFullError(
        f"{said}: {free} bytes are free where {folder} lies; {FULL[said]}, then clone the job"
    )


def prepare_process() -> None:
    """Set the number of threads before torch's first operation, and silence warnings."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(num_threads()))
    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(num_threads())


def num_threads() -> int:
    """Return a job's number of threads: ``OMP_NUM_THREADS``, else all allowed cores."""
    configured = os.environ.get("OMP_NUM_THREADS", "")
    if configured.isdigit() and int(configured) > 0:
        return int(configured)
    return len(os.sched_getaffinity(0))


def open_job(attempt_dir: Path, kind: str) -> Job:
    """Return the job of an attempt folder.

    Raises:
        BadInputError: spec.json is missing, unreadable or of another kind.
    """
    request = _with_own_gang(read_request(attempt_dir / "spec.json"))
    if request.spec.kind != kind:
        msg = f"{attempt_dir}/spec.json asks for kind '{request.spec.kind}', this is '{kind}'"
        raise BadInputError(msg)
    attempt_dir = attempt_dir.resolve()
    configured = os.environ.get(HOST_DIR_VARIABLE)
    host_dir = Path(configured) if configured else attempt_dir.parent.parent
    return Job(attempt_dir, host_dir, request, Emitter.from_environment(), threading.Event())


def _with_own_gang(request: RunRequest) -> RunRequest:
    """Return the request with the gang of this node, where several share the attempt's folder."""
    text = os.environ.get(GANG_VARIABLE)
    if text is None:
        return request
    return request.model_copy(update={"gang": Gang.model_validate_json(text)})


def checkpoint_on_sigterm(job: Job) -> None:
    """Set ``job.stop_requested`` on SIGTERM, so that the loop can save first."""
    signal.signal(signal.SIGTERM, lambda _signum, _frame: job.stop_requested.set())


def end_by_sigterm(job: Job) -> None:
    """Die by SIGTERM, so that the parent sees a stop and not a success.

    If another rank was stopped first, wait for this host's own stop signal.
    """
    job.stop_requested.wait(PEERS_STOP_SECONDS)
    job.emitter.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def read_request(path: Path) -> RunRequest:
    """Return the request of an attempt.

    Raises:
        BadInputError: the file is missing, unreadable or no such request.
    """
    try:
        return RunRequest.model_validate_json(path.read_bytes())
    except OSError as error:
        msg = f"cannot read {path}: {error.strerror}; give a folder that holds a spec.json"
        raise BadInputError(msg) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        msg = f"{path} is not a valid run request: {field}: {first['msg']}"
        raise BadInputError(msg) from error


def _only_argument(kind: str) -> str:
    _program, *given = sys.argv
    if len(given) != 1:
        msg = f"a job of kind {kind} is started with one argument, ATTEMPT_DIR, not {len(given)}"
        raise BadInputError(msg)
    return given[0]


# Checks the compiler for torch.compile and sets its kernel cache.


KERNEL_CACHE = "TORCHINDUCTOR_CACHE_DIR"
# torch sets this default itself when parts of it are imported; all jobs of a user share it.
SHARED_PREFIX = "torchinductor_"


def check_compiler(scratch: Path, field: str) -> None:
    """Prepare compilation as ``prepare_compiler`` does, which ``field`` of the spec requests.

    Raises:
        BadInputError: this host has no compiler.
    """
    if not prepare_compiler(scratch):
        msg = (
            f"{field} needs the compiler {compiler_name()}, which this host lacks; install it, or "
            f"leave {field} out"
        )
        raise BadInputError(msg)


def prepare_compiler(scratch: Path) -> bool:
    """Set the kernel cache to a folder of the job, unless the operator has named one.

    A job that is killed while it compiles leaves a kernel that is cut short, which would fail
    every later job that shares the cache. Returns False if this host has no compiler.
    """
    if shutil.which(compiler_name()) is None:
        return False
    shared = str(Path(tempfile.gettempdir()) / SHARED_PREFIX)
    if os.environ.get(KERNEL_CACHE, shared).startswith(shared):
        os.environ[KERNEL_CACHE] = str(scratch)
    return True


# ---------------------------------------------------------------------------
# Samples the host's devices once a second for a job: GPU figures and energy.
# ---------------------------------------------------------------------------


# GPU figures from inside the job on AMD GPUs, through amdsmi.


def amd_sample() -> Sample | None:
    """Return a sampler of this process's visible GPUs, or None without amdsmi or GPU."""
    library = amd.open_library()
    if library is None or not list(amd.loads(library)):
        return None

    def sample() -> dict[str, float]:
        values: dict[str, float] = {}
        for index, load in enumerate(amd.loads(library)):
            values[f"gpu{index}_memory_bytes"] = float(load.memory_used_bytes)
            values[f"gpu{index}_utilization"] = load.utilization
            if load.power_watts is not None:
                values[f"gpu{index}_power_watts"] = load.power_watts
        return values

    return sample


INTERVAL_SECONDS = 1.0


def nvml_sample() -> Sample | None:
    """Return a sampler of the visible GPUs, or None without torch CUDA or the vendor's library."""
    import torch  # here: serving engines' environments have GPUs but no torch

    if not torch.cuda.is_available():
        return None
    if torch.version.hip:
        return amd_sample()
    return visible_sample()


def no_gpus() -> None:
    """Return None: the job computes on the CPU only."""


@contextlib.contextmanager
def job_telemetry(job: Job, sample: Callable[[], Sample | None] = nvml_sample) -> Iterator[None]:
    """Sample the devices while the block runs: "gpu" metrics, and joules in the result."""
    gang = job.request.gang
    meter = EnergyMeter(sample(), zones(), hosts=gang.num_nodes if gang else 1)
    job.emitter.meter = meter
    meter.read()
    ended = threading.Event()
    thread = threading.Thread(
        target=_read_until, args=(ended, job, meter), name="telemetry", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(2 * INTERVAL_SECONDS)


def _read_until(ended: threading.Event, job: Job, meter: EnergyMeter) -> None:
    while meter.has_sensor and not ended.wait(INTERVAL_SECONDS):
        job.emitter.metric(meter.read(), source="gpu")


# ---------------------------------------------------------------------------
# Publishes a folder of the attempt's output: written aside, hashed, renamed, announced.
# ---------------------------------------------------------------------------


CARD_NAME = "README.md"
WEIGHT_SUFFIXES = (".safetensors", ".gguf")


def publish_model(
    job: Job,
    write: Callable[[Path], object],
    card: str,
    facts: Mapping[str, Any],
    kind: Literal["model", "adapter"] = "model",
) -> ArtefactBody:
    """Write a folder of weights with its card to ``output/<kind>`` and announce it."""

    def write_with_card(building: Path) -> None:
        write(building)
        (building / CARD_NAME).write_text(f"{card}\n{_file_table(building)}")

    return publish_folder(job, kind, kind, write_with_card, facts)


def publish_report(job: Job, name: str, document: Mapping[str, Any]) -> ArtefactBody:
    """Publish a document as a downloadable file and as facts for the job's page."""

    def write(building: Path) -> None:
        (building / f"{name}.json").write_text(json.dumps(document, indent=1))

    return publish_folder(job, name, "report", write, document)


def publish_folder(
    job: Job,
    name: str,
    kind: ArtefactKind,
    write: Callable[[Path], object],
    facts: Mapping[str, Any],
) -> ArtefactBody:
    """Write an output folder aside, move it into place atomically, and announce it."""
    final = job.output_dir(name)
    building = final.with_name(f".{name}-building")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    write(building)
    shutil.rmtree(final, ignore_errors=True)
    building.rename(final)
    body = describe_folder(final, facts, kind)
    job.emitter.artefact(body)
    return body


def describe_folder(
    folder: Path, facts: Mapping[str, Any], kind: ArtefactKind = "model"
) -> ArtefactBody:
    """Return sizes and digests of every file in the folder."""
    files = {path.relative_to(folder).as_posix(): path for path in _files(folder)}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    return ArtefactBody(
        name=folder.name,
        kind=kind,
        total_bytes=sum(sizes.values()),
        files=sizes,
        sha256={name: file_sha256(path) for name, path in files.items()},
        facts=dict(facts),
    )


def weight_file_bytes(folder: Path) -> int:
    """Return the size of a model folder's weight files in bytes."""
    files = (path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    return sum(path.stat().st_size for path in files)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def card_text(title: str, sections: Mapping[str, Mapping[str, object]]) -> str:
    """Return a model card: a title, then one table per section."""
    parts = [f"# {title}\n"]
    for heading, rows in sections.items():
        lines = [f"| {name} | {_cell(value)} |" for name, value in rows.items()]
        parts.append("\n".join([f"## {heading}\n", "| | |", "|---|---|", *lines, ""]))
    return "\n".join(parts)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _file_table(folder: Path) -> str:
    rows = [
        f"| {path.relative_to(folder).as_posix()} | {path.stat().st_size} | {file_sha256(path)} |"
        for path in _files(folder)
    ]
    return "\n".join(["## Files\n", "| file | bytes | SHA-256 |", "|---|---|---|", *rows, ""])


def _cell(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
