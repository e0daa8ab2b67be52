"""The command, environment and rendezvous with which a job is launched."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil

from runners.devices.topology import BY_BUS, ORDER, job_variables
from runners.environments.builder import pip_variables
from runners.hub.object_store import S3
from runners.hub.settings import PASSED as PASSED_TO_HUB
from runners.hub.settings import SOURCES
from runners.jobspec import (
    ArtefactModel,
    DataParallel,
    DrillSpec,
    EvaluateSpec,
    FileData,
    FilePrompts,
    FolderModel,
    GenerateSpec,
    JobSpec,
    MixedData,
    ProveSpec,
    PublishSpec,
    TrainData,
    TrainSpec,
)
from runners.jobspec.base import is_store_url, store_fault
from runners.jobspec.compress import TASKS_ENVIRONMENT
from runners.jobspec.engines import ENGINES, OWN, Engine
from runners.jobspec.generate import StageChain
from runners.jobspec.kinds import KINDS
from runners.jobspec.objectives import OWN_TRAINER, TRL, TRL_ENVIRONMENT
from runners.jobspec.references import (
    Reference,
    hub_references,
    store_references,
    with_references,
)
from runners.jobspec.trackers import TRACKERS
from runners.launchers.attempts import LOST_REASONS, AttemptFolder, Verdict
from runners.shared.addresses import own_addresses
from runners.shared.environment import NETWORK, TRACKER_VARIABLE
from runners.shared.messages import MAIN, Gang, RunDevice, RunRequest
from runners.shared.object_stores import ObjectStore, store_of
from runners.shared.reasons import Reason
from runners.supervision import child, procfs, supervisor

# ---------------------------------------------------------------------------
# Launches a job on several devices or hosts with torchrun, and finds the network interface.
#
# Each host starts one torchrun; the first host's serves the rendezvous at the address and port
# reserved by the server. The job sets the timeout for a silent rank, from which all other
# timeouts are derived, except the start timeout: loading the libraries takes longer.
# ---------------------------------------------------------------------------


FETCH = "runners.jobs.fetch"  # downloads models, then execs the job
IN_ENVIRONMENT = "runners.jobs.in_environment"  # builds what is missing, then execs the job
HUB_VARIABLES = (*PASSED_TO_HUB, *(each.token_name for each in SOURCES.values()))
OFFLINE = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}  # libraries download nothing
MEETING = "runners.jobs.meeting"  # starts torchrun when the rendezvous is reachable
SHORTEST_LAST_CALL_SECONDS = 5
LONGEST_LAST_CALL_SECONDS = 30


class NoSuchAddressError(Exception):
    """The configured address is not one of this host's addresses."""


def torchrun_argv(command: Sequence[str], gang: Gang, parallel: DataParallel) -> list[str]:
    """Return the torchrun command that runs this host's ranks of ``command``.

    ``command`` begins with a Python interpreter; the rest goes to each rank. Hosts other than
    the rendezvous host wait until it is reachable, which torchrun alone does not.
    """
    python, *program = command
    fewest = min(parallel.min_hosts, gang.num_nodes)
    least = fewest if parallel.on_lost_rank == "shrink" else gang.num_nodes
    options = {
        "nnodes": f"{least}:{gang.num_nodes}",
        "nproc-per-node": gang.num_processes,
        "rdzv-backend": "c10d",
        "rdzv-endpoint": endpoint(gang.master_address, gang.master_port),
        "rdzv-id": gang.rendezvous_id,
        "rdzv-conf": ",".join(
            f"{key}={value}" for key, value in _rendezvous_timeouts(gang, parallel).items()
        ),
        "local-addr": gang.own_address,
        "max-restarts": _restarts(gang.num_nodes - least, parallel),
    }
    written = [f"--{name}={value}" for name, value in options.items()]
    torchrun = ["-m", "torch.distributed.run"]
    if gang.node_rank > 0:
        seconds = f"{parallel.start_timeout_seconds:g}"
        torchrun = ["-m", MEETING, gang.master_address, str(gang.master_port), seconds]
    return [python, *torchrun, *written, *program]


def _restarts(may_lose: int, parallel: DataParallel) -> int:
    """Return the number of restarts of all ranks: ``max_restarts``, or one per host to lose."""
    return parallel.max_restarts if parallel.on_lost_rank == "restart" else may_lose


def _rendezvous_timeouts(gang: Gang, parallel: DataParallel) -> dict[str, int | str]:
    """Return torchrun's rendezvous timeouts in seconds, derived from the rank timeout."""
    timeout = int(parallel.rank_timeout_seconds)
    last_call = min(LONGEST_LAST_CALL_SECONDS, max(SHORTEST_LAST_CALL_SECONDS, timeout // 4))
    return {
        "is_host": str(gang.node_rank == 0).lower(),
        "join_timeout": int(parallel.start_timeout_seconds),
        "last_call_timeout": last_call,
        "read_timeout": timeout,
        "keep_alive_interval": max(1, timeout // 6),
        "keep_alive_max_attempt": 3,
    }


def endpoint(address: str, port: int) -> str:
    """Return ``address:port``, with an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def gang_env(gang: Gang) -> dict[str, str]:
    """Return the additional environment variables of a gang's processes.

    Interfaces that the agent's own environment names stay: NCCL's may be InfiniBand's.

    Raises:
        NoSuchAddressError: this host has no such address.
    """
    interface = interface_of(gang.own_address)
    return {
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", interface),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", interface),
        # One store per rendezvous round: a lost round leaves no stale keys.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # One malloc arena, because contending threads get fragmented arenas of their own: a
        # training on two ranks peaked at 627 to 680 MiB, and at 621 to 628 MiB with one arena.
        "MALLOC_ARENA_MAX": "1",
    }


def interface_of(address: str) -> str:
    """Return the network interface that has an address.

    Raises:
        NoSuchAddressError: no interface has this address.
    """
    for interface, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in addresses):
            return interface
    known = ", ".join(own_addresses()) or "none"
    raise NoSuchAddressError(
        f"{address} is not an address of this host (it has {known}); choose another on the "
        "host's page, or enrol it again with --address"
    )


# ---------------------------------------------------------------------------
# Maps a job to its environment: that of its serving engine, evaluation harness or trainer.
# ---------------------------------------------------------------------------


def engine_of(spec: Mapping[str, Any]) -> Engine | None:
    """Return the engine of a job's document, or None if its kind has none."""
    return ENGINES.get(spec.get("engine", OWN)) if spec.get("kind") == "serve" else None


def environment_of(spec: Mapping[str, Any]) -> str:
    """Return the environment of a job's document."""
    if spec.get("kind") == "evaluate" and spec.get("tasks"):
        return TASKS_ENVIRONMENT
    if spec.get("kind") == "train" and spec.get("engine") == TRL:
        return TRL_ENVIRONMENT
    engine = engine_of(spec)
    if engine is None:
        return MAIN
    is_on_cpu = (spec.get("engine_options") or {}).get("device") == "cpu"
    return (engine.cpu_environment if is_on_cpu else None) or engine.environment or MAIN


# ---------------------------------------------------------------------------
# Launches a job's supervisor from its spec: argv, environment, path checks, detached start.
# ---------------------------------------------------------------------------


# A job's environment variables: the agent's that are passed on, and those of its devices.
#
# Every other variable stays with the agent: credentials, and loader or interpreter hooks
# (``LD_PRELOAD``, ``PYTHONSTARTUP``) that run code in the job.


# Names that are passed on, and whole families of names by their prefix ("NCCL_*"), by reason.
PASSED = {
    "the user, the locale and the folders of programs, caches and temporary files": (
        "HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER", "XDG_CACHE_HOME",
    ),
    # The operator's own value: a driver's or toolkit's folder that ldconfig does not list.
    "where the GPU libraries and their toolkit are": (
        "CUDA_HOME", "CUDA_PATH", "HIP_PATH", "LD_LIBRARY_PATH", "ROCM_PATH",
    ),
    # Cluster documentation asks for them, and a wrong interface is a hang, not an error.
    "the interfaces and transports of collectives": (
        "FI_*", "GLOO_SOCKET_IFNAME", "NCCL_*", "RCCL_*", "TORCH_NCCL_*", "UCX_*",
    ),
    "the compilers of kernels and the caches of what they built": (
        "CC", "CUDA_CACHE_*", "CXX", "TORCHINDUCTOR_CACHE_DIR", "TORCH_CUDA_ARCH_LIST",
        "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR",
    ),
    "the settings of drivers, allocators and kernel libraries": (
        "AMD_SERIALIZE_KERNEL", "CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING", "HSA_*", "MIOPEN_*",
        "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF",
    ),
    # They hold unless the job was assigned devices of its own.
    "the devices that the agent may use": (
        "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    ),
}  # fmt: skip
# A family may gain a name that carries a credential.
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_NAMES = frozenset(name for names in PASSED.values() for name in names)
_FAMILIES = tuple(name.removesuffix("*") for name in sorted(_NAMES) if name.endswith("*"))
# Indices into what another variable left visible: dropped when devices are named by UUID.
_BY_INDEX = frozenset(
    {"CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}
)


def is_passed(name: str) -> bool:
    """Return whether every job gets the agent's value of a variable."""
    return name in _NAMES or (name.startswith(_FAMILIES) and not _SECRET.search(name))


def with_devices(env: Mapping[str, str], devices: Sequence[RunDevice]) -> dict[str, str]:
    """Return the environment of a job that sees these devices alone.

    GPUs are named by UUID, which is stable across reboots; a job without any keeps what the agent
    may use.
    """
    gpus = [device for device in devices if device.kind == "gpu"]
    visible = job_variables([gpu.uuid for gpu in gpus], [gpu.index for gpu in gpus])
    # Ordered as in nvidia-smi, so that an index in a message is the one that NVML shows.
    order = {ORDER: BY_BUS}
    if not visible:
        return order | dict(env)
    return order | {name: value for name, value in env.items() if name not in _BY_INDEX} | visible


LAUNCH_TIMEOUT_SECONDS = 30.0


class LaunchRefusedError(Exception):
    """This host refuses to start an attempt; ``reason`` goes into its exit record."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def render_argv(spec: JobSpec, folder: Path) -> list[str]:
    """Return a job's command: this interpreter, a module of the list, the attempt folder.

    Raises:
        LaunchRefusedError: this host does not run this kind of job.
    """
    kind = KINDS.get(spec.kind)
    if kind is None:
        known = ", ".join(KINDS)
        raise LaunchRefusedError(
            Reason.VERSION_INCOMPATIBLE,
            f"this host runs {known}, not {spec.kind}; update its software",
        )
    engine, environments = engine_of(_named(spec)), environments_of(spec)
    if environments != [MAIN]:
        start = [sys.executable, "-m", IN_ENVIRONMENT, ",".join(environments)]
        return [*start, engine.module if engine else kind.module, str(folder)]
    return [sys.executable, "-m", kind.module, str(folder)]


def environments_of(spec: JobSpec) -> list[str]:
    """Return the environment that a job starts in, and those of which it starts processes."""
    tracker = [spec.tracker.name] if isinstance(spec, TrainSpec) and spec.tracker else []
    return [environment_of(_named(spec)), *tracker]


def _named(spec: JobSpec) -> dict[str, object]:
    return spec.model_dump(include={"kind", "engine", "engine_options", "tasks"})


def inherited_variables(spec: JobSpec) -> list[str]:
    """Return the names of variables that a job inherits, and drops before its program starts.

    They are pip's if it may build an environment, as for an object store's library, the hub's if
    it may download something, the host's own key of stores if it names an address of one, and
    those of the network if its tracker may write to a server.
    """
    builds = environments_of(spec) != [MAIN] or store_references(spec)
    pip = pip_variables() if builds else ()
    hub = HUB_VARIABLES if _asks_hub(spec) else ()
    of_store = S3.secrets if store_references(spec) else ()
    return sorted({*pip, *hub, *of_store, *_of_tracker(spec)})


def _of_tracker(spec: JobSpec) -> list[str]:
    tracker = spec.tracker if isinstance(spec, TrainSpec) else None
    has_server = tracker is not None and TRACKERS[tracker.name].has_server
    return [name for name in NETWORK if not is_passed(name)] if has_server else []


def tracker_env(spec: JobSpec) -> dict[str, str]:
    """Return the variable that names what a job inherits for its tracker alone."""
    names = _of_tracker(spec)
    return {TRACKER_VARIABLE: ",".join(names)} if names else {}


def _asks_hub(spec: JobSpec) -> bool:
    return isinstance(spec, PublishSpec) or downloads(spec)


def downloads(spec: JobSpec) -> bool:
    """Return whether a job first downloads something that its spec names."""
    return bool(hub_references(spec) or store_references(spec))


def after_download(
    spec: JobSpec, folder: Path, argv: list[str]
) -> tuple[list[str], dict[str, str]]:
    """Return a command that first downloads what a spec names elsewhere, and its variables."""
    if isinstance(spec, PublishSpec):
        return argv, dict.fromkeys(OFFLINE, "0")
    if not downloads(spec):
        return argv, {}
    return [sys.executable, "-m", FETCH, str(folder), *argv], dict.fromkeys(OFFLINE, "0")


def hub_env() -> dict[str, str]:
    """Return the variables of a process that asks the hub, of those that this process has."""
    return dict.fromkeys(OFFLINE, "0") | {
        name: os.environ[name] for name in HUB_VARIABLES if name in os.environ
    }


def render_env(
    host_dir: Path,
    running_jobs: int,
    model_roots: Sequence[Path] = (),
    devices: Sequence[RunDevice] = (),
    reward_roots: Sequence[Path] = (),
) -> dict[str, str]:
    """Return a job's environment: the passed variables, its devices' and our own, no others.

    The running jobs share the cores that the agent may use.
    """
    passed = {name: value for name, value in os.environ.items() if is_passed(name)}
    env = with_devices(passed, devices) | OFFLINE
    return env | {
        "OMP_NUM_THREADS": str(max(1, int(procfs.usable_cores() // max(1, running_jobs)))),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "PYTHONSAFEPATH": "1",  # never import from the working folder
        "PYTHONUNBUFFERED": "1",
        "SLIPWAY_HOST_DIR": str(host_dir),
        "SLIPWAY_MODEL_ROOTS": os.pathsep.join(map(str, model_roots)),
        "SLIPWAY_REWARD_ROOTS": os.pathsep.join(map(str, reward_roots)),
    }


def gang_command(
    request: RunRequest, spec: JobSpec, argv: list[str]
) -> tuple[list[str], dict[str, str]]:
    """Return a job's command and extra environment variables; a gang's run under torchrun.

    Raises:
        LaunchRefusedError: this kind of job runs as one process, or the address is not one of
        this host's.
    """
    if request.gang is None:
        return argv, {}
    is_split = isinstance(spec, GenerateSpec) and spec.split is not None
    is_divided = isinstance(spec, TrainSpec) and spec.engine == OWN_TRAINER
    if not (isinstance(spec, TrainSpec | GenerateSpec) and (is_split or is_divided)):
        raise LaunchRefusedError(
            Reason.VERSION_INCOMPATIBLE,
            f"{spec.kind} runs on one device of one host; only training by our own trainer and "
            "split generation run on several; launch it on one device",
        )
    try:
        env = gang_env(request.gang)
        if isinstance(spec, GenerateSpec) and isinstance(spec.split, StageChain):
            return argv, env  # stage servers connect without torchrun and end independently
        return torchrun_argv(argv, request.gang, spec.parallel), env
    except NoSuchAddressError as error:
        raise LaunchRefusedError(Reason.PREFLIGHT_FAILED, str(error)) from None


def confine(
    spec: JobSpec,
    roots: Sequence[Path],
    attempts_dir: Path,
    reward_roots: Sequence[Path] = (),
    stores: Sequence[ObjectStore] = (),
) -> JobSpec:
    """Return the spec with its paths resolved and checked to be below a root.

    Files of reward functions are code: they lie below roots of their own, which no job writes.
    Addresses of object stores are below a prefix of the host's ``stores``.

    Raises:
        LaunchRefusedError: a path is outside of every root, or does not exist.
    """
    if isinstance(spec, DrillSpec | ProveSpec):
        return spec
    spec = with_references(spec, lambda model: confine_model(model, roots, attempts_dir, stores))
    updates: dict[str, object] = {}
    if isinstance(spec, TrainSpec):
        updates["data"] = _confine_data(spec.data, roots)
        updates["reward_functions"] = tuple(
            each.model_copy(update={"path": str(_path_below(each.path, reward_roots, REWARDS))})
            if each.path
            else each
            for each in spec.reward_functions
        )
    if isinstance(spec, EvaluateSpec) and spec.tasks is not None and spec.tasks.folder:
        folder = str(_resolve_below(spec.tasks.folder, roots, "task folder"))
        updates["tasks"] = spec.tasks.model_copy(update={"folder": folder})
    if isinstance(spec, GenerateSpec) and isinstance(spec.prompts, FilePrompts):
        updates["prompts"] = FilePrompts(path=str(_path_below(spec.prompts.path, roots)))
    return spec.model_copy(update=updates)


def _confine_data(data: TrainData, roots: Sequence[Path]) -> TrainData:
    """Return the data with every file path resolved and checked to be below a root.

    Raises:
        LaunchRefusedError: a path is outside of every root.
    """
    if isinstance(data, FileData):
        if is_store_url(data.path):
            return data
        return data.model_copy(update={"path": str(_path_below(data.path, roots))})
    if not isinstance(data, MixedData):
        return data
    parts = [
        part.model_copy(update={"data": _confine_data(part.data, roots)}) for part in data.parts
    ]
    return data.model_copy(update={"parts": tuple(parts)})


def confine_model(
    model: Reference,
    roots: Sequence[Path],
    attempts_dir: Path,
    stores: Sequence[ObjectStore] = (),
) -> Reference:
    """Return the reference with its folder resolved and checked to be below a root.

    Raises:
        LaunchRefusedError: the folder is outside of every root, or does not exist; an address is
            below no prefix of the stores.
    """
    if isinstance(model, FolderModel | FileData) and is_store_url(model.path):
        refuse_unlisted_store(model.path, stores)
        return model
    if isinstance(model, FolderModel):
        return FolderModel(path=str(_resolve_below(model.path, roots)))
    if isinstance(model, ArtefactModel):
        for part in (model.attempt_id, model.name):
            _refuse_unsafe_name(part)
        _require_folder(attempts_dir / model.attempt_id / "output" / model.name)
    return model


def refuse_unlisted_store(url: str, stores: Sequence[ObjectStore]) -> None:
    """Raise if an address is below no prefix that the host's operator lists.

    Raises:
        LaunchRefusedError: the message names the prefixes and the way out.
    """
    _refuse_no_address(url)
    if store_of(url, stores) is None:
        listed = ", ".join(each.prefix for each in stores) or "none"
        raise LaunchRefusedError(
            Reason.PREFLIGHT_FAILED,
            f"{url} is below none of this host's object stores ({listed}); let its operator add "
            'its prefix to "object_stores" in config.json, as {"prefix": "s3://BUCKET/PREFIX"}, '
            "or copy it to a folder of the host",
        )


def refuse_missing(names: Sequence[str], values: Mapping[str, str]) -> None:
    """Raise if the team no longer has a secret that the job names.

    Raises:
        LaunchRefusedError: a secret is missing; the message names every missing one.
    """
    if missing := [name for name in names if name not in values]:
        raise LaunchRefusedError(
            Reason.PREFLIGHT_FAILED,
            f"the team has no secret {', '.join(missing)}; store it under Secrets, or launch "
            "the job without it",
        )


def refuse_unlisted_tracker(spec: JobSpec, addresses: Sequence[str]) -> None:
    """Raise if a team's secret would go to a tracking server that the operator has not listed.

    Raises:
        LaunchRefusedError: the message names the secret, the address and both ways out.
    """
    tracker = spec.tracker if isinstance(spec, TrainSpec) else None
    if tracker is None or not (secret := tracker.secret_among(spec.secrets)):
        return
    if not tracker.is_at(addresses):
        raise LaunchRefusedError(
            Reason.PREFLIGHT_FAILED,
            f"the secret {secret} would go to {tracker.url}, which is none of this host's "
            f"tracking servers ({', '.join(addresses) or 'none'}); let its operator add the "
            f'address to "tracker_urls" in config.json, or launch the job without {secret}',
        )


def _refuse_no_address(path: str) -> None:
    if fault := store_fault(path):
        raise LaunchRefusedError(Reason.PREFLIGHT_FAILED, fault)


def _resolve_below(text: str, roots: Sequence[Path], what: str = "model folder") -> Path:
    path = _path_below(text, roots)
    _require_folder(path, what)
    return path


class _Roots(NamedTuple):
    what: str
    option: str  # of config.json


MODELS = _Roots("model", "model_roots")
REWARDS = _Roots("reward", "reward_roots")


def _path_below(text: str, roots: Sequence[Path], kind: _Roots = MODELS) -> Path:
    _refuse_no_address(text)
    if "\0" in text or not roots:
        raise LaunchRefusedError(
            Reason.PREFLIGHT_FAILED,
            f"path {text!r} is not usable: it has a null character, or this host has no "
            f'{kind.what} folders; name one under "{kind.option}" in config.json',
        )
    path = (roots[0] / text).resolve()
    if not any(path.is_relative_to(root.resolve()) for root in roots):
        listed = ", ".join(str(root) for root in roots)
        raise LaunchRefusedError(
            Reason.PREFLIGHT_FAILED,
            f"path {text!r} is outside of this host's {kind.what} folders ({listed}); "
            f'move it there, or add its folder to "{kind.option}" in config.json',
        )
    return path


def _require_folder(path: Path, what: str = "model folder") -> None:
    if not path.is_dir():
        raise LaunchRefusedError(
            Reason.MODEL_OR_DATA_MISSING, f"{what} {path} is not on this host; copy it there"
        )


def _refuse_unsafe_name(name: str) -> None:
    is_plain = name.replace("-", "").replace("_", "").replace(".", "").isalnum()
    if not (is_plain and name.isascii() and not name.startswith(".")):
        raise LaunchRefusedError(
            Reason.PREFLIGHT_FAILED,
            f"{name!r} is not a valid artefact name; use only letters, digits, '-', '_', '.'",
        )


def start_supervisor(folder: Path) -> int:
    """Start the attempt's supervisor, detached; return ``supervisor.STARTED`` or an error code.

    The supervisor forks again, so init is its parent when this returns, and the end of this
    process does not affect it.
    """
    started = subprocess.run(
        [sys.executable, "-S", "-E", supervisor.__file__, str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        timeout=LAUNCH_TIMEOUT_SECONDS,
        check=False,
    )
    return started.returncode


# ---------------------------------------------------------------------------
# The launcher interface: start, inspect and stop attempts, and explain unrecorded ends.
# ---------------------------------------------------------------------------


class UnrecordedEnd(NamedTuple):
    """The reason and a readable explanation of an end without an exit record."""

    reason: Reason
    explanation: str = ""


class Launcher(Protocol):
    """Starts, inspects and stops the supervisors of this host."""

    def refresh(self, folders: Sequence[AttemptFolder]) -> None:
        """Refresh the launcher's state; called before each round of ``verdict_of``."""

    def verdict_of(self, folder: AttemptFolder) -> Verdict:
        """Return an attempt's state."""

    def command(
        self, request: RunRequest, spec: JobSpec, argv: list[str], folder: Path
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command of a job's process or ranks, and extra environment variables.

        Raises:
            LaunchRefusedError: this launcher cannot run such a job.
        """

    def adapt(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the supervisor's launch document, adapted to this launcher."""

    def launch(self, folder: AttemptFolder) -> None:
        """Start a folder's supervisor after its documents are written; idempotent.

        Raises:
            LaunchRefusedError: the attempt cannot start.
        """

    def stop(self, folder: AttemptFolder) -> None:
        """Make the supervisor read the stop order in its folder now."""

    def unrecorded_end(self, folder: AttemptFolder, verdict: Verdict) -> UnrecordedEnd | None:
        """Return why an attempt ended without a record, or None if it did not."""

    def waits_for(self, folder: AttemptFolder) -> str:
        """Return what a claimed attempt waits for outside of this host, or ""."""


class LocalLauncher:
    """Starts supervisors as local processes."""

    def __init__(self, boot_id: str) -> None:
        self._boot_id = boot_id

    def refresh(self, folders: Sequence[AttemptFolder]) -> None:
        """Do nothing: locks and files are read on demand."""

    def verdict_of(self, folder: AttemptFolder) -> Verdict:
        """Return the attempt's state from its lock and files."""
        return folder.verdict(self._boot_id)

    def command(
        self,
        request: RunRequest,
        spec: JobSpec,
        argv: list[str],
        folder: Path,  # noqa: ARG002 - the interface
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command, a gang's under torchrun.

        Raises:
            LaunchRefusedError: the kind of job runs as one process, or an address is not ours.
        """
        return gang_command(request, spec, argv)

    def adapt(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document unchanged."""
        return dict(document)

    def launch(self, folder: AttemptFolder) -> None:
        """Start the supervisor, detached.

        Raises:
            LaunchRefusedError: the supervisor failed at once.
        """
        if start_supervisor(folder.path) == supervisor.EXIT_INTERNAL:
            raise LaunchRefusedError(
                Reason.INTERNAL,
                f"the supervisor failed at once; see {folder.path / 'supervisor.log'}",
            )

    def stop(self, folder: AttemptFolder) -> None:
        """Signal the supervisor to read its stop order now."""
        if identity := child.read_json(folder.path / child.SUPERVISOR):
            pid, ticks = int(identity["pid"]), int(identity["start_ticks"])
            procfs.send_signal(pid, ticks, signal.SIGTERM)

    def unrecorded_end(self, folder: AttemptFolder, verdict: Verdict) -> UnrecordedEnd | None:  # noqa: ARG002 - the interface
        """Return the reason of a lost attempt."""
        reason = LOST_REASONS.get(verdict)
        return UnrecordedEnd(reason) if reason else None

    def waits_for(self, folder: AttemptFolder) -> str:  # noqa: ARG002 - the interface
        """Return "": local attempts start at once."""
        return ""
