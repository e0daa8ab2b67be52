"""Launches a job's supervisor from its spec: argv, environment, path checks, detached start."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from runners import supervisor
from runners.devices.visibility import BY_BUS, ORDER, job_variables
from runners.engines import engine_of, environment_of
from runners.environments.builder import pip_variables
from runners.gangs import NoSuchAddressError, gang_env, torchrun_argv
from runners.jobspec import (
    ArtefactModel,
    DraftGuess,
    DrillSpec,
    EvaluateSpec,
    FileData,
    FilePrompts,
    FolderModel,
    GenerateSpec,
    JobSpec,
    MixedData,
    ModelRef,
    ProveSpec,
    TrainData,
    TrainSpec,
)
from runners.jobspec.generate import StageChain
from runners.messages import MAIN, RunDevice, RunRequest
from runners.reasons import Reason

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


def passed_variables(given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the given variables that a job receives."""
    return {name: value for name, value in given.items() if _is_passed(name)}


def _is_passed(name: str) -> bool:
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


JOB_MODULES: Mapping[str, str] = {
    "train": "runners.jobs.train",
    "compress": "runners.jobs.compress",
    "evaluate": "runners.jobs.evaluate",
    "benchmark": "runners.jobs.benchmark",
    "generate": "runners.jobs.generate",
    "serve": "runners.jobs.serve",
    "drill": "runners.jobs.drill",
    "prove": "runners.jobs.prove",
}
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
    module = JOB_MODULES.get(spec.kind)
    if module is None:
        known = ", ".join(JOB_MODULES)
        raise LaunchRefusedError(
            Reason.VERSION_INCOMPATIBLE,
            f"this host runs {known}, not {spec.kind}; update its software",
        )
    engine, environment = engine_of(_named(spec)), environment_of(_named(spec))
    if environment != MAIN:
        start = [sys.executable, "-m", "runners.jobs.in_environment", environment]
        return [*start, engine.module if engine else module, str(folder)]
    return [sys.executable, "-m", module, str(folder)]


def _named(spec: JobSpec) -> dict[str, object]:
    return spec.model_dump(include={"kind", "engine", "tasks"})


def inherited_variables(spec: JobSpec) -> list[str]:
    """Return the names of variables a job inherits: pip's, if it may build an environment."""
    return sorted(pip_variables()) if environment_of(_named(spec)) != MAIN else []


def render_env(
    host_dir: Path,
    running_jobs: int,
    model_roots: Sequence[Path] = (),
    devices: Sequence[RunDevice] = (),
) -> dict[str, str]:
    """Return a job's environment: the passed variables, its devices' and our own, no others."""
    env = with_devices(passed_variables(), devices)
    cores = len(os.sched_getaffinity(0))
    return env | {
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",  # libraries must not download anything
        "OMP_NUM_THREADS": str(max(1, cores // max(1, running_jobs))),
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        "PYTHONSAFEPATH": "1",  # never import from the working folder
        "PYTHONUNBUFFERED": "1",
        "SLIPWAY_HOST_DIR": str(host_dir),
        "SLIPWAY_MODEL_ROOTS": os.pathsep.join(map(str, model_roots)),
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
    if not (isinstance(spec, TrainSpec | GenerateSpec) and (is_split or spec.kind == "train")):
        raise LaunchRefusedError(
            Reason.VERSION_INCOMPATIBLE,
            f"{spec.kind} runs on one device of one host; training is shared out, and a "
            "generation whose model is split",
        )
    try:
        env = gang_env(request.gang)
        if isinstance(spec, GenerateSpec) and isinstance(spec.split, StageChain):
            return argv, env  # stage servers connect without torchrun and end independently
        return torchrun_argv(argv, request.gang, spec.parallel), env
    except NoSuchAddressError as error:
        raise LaunchRefusedError(Reason.PREFLIGHT_FAILED, str(error)) from None


def confine(spec: JobSpec, roots: Sequence[Path], attempts_dir: Path) -> JobSpec:
    """Return the spec with its paths resolved and checked to be below a root.

    Raises:
        LaunchRefusedError: a path is outside of every root, or does not exist.
    """
    if isinstance(spec, DrillSpec | ProveSpec):
        return spec
    updates: dict[str, object] = {"model": confine_model(spec.model, roots, attempts_dir)}
    if isinstance(spec, EvaluateSpec) and spec.original is not None:
        updates["original"] = confine_model(spec.original, roots, attempts_dir)
    if isinstance(spec, TrainSpec):
        updates["data"] = _confine_data(spec.data, roots)
    if isinstance(spec, EvaluateSpec) and spec.tasks is not None and spec.tasks.folder:
        folder = str(_resolve_below(spec.tasks.folder, roots, "task folder"))
        updates["tasks"] = spec.tasks.model_copy(update={"folder": folder})
    if isinstance(spec, GenerateSpec) and isinstance(spec.prompts, FilePrompts):
        updates["prompts"] = FilePrompts(path=str(_path_below(spec.prompts.path, roots)))
    if isinstance(spec, GenerateSpec) and isinstance(spec.speculation, DraftGuess):
        draft = confine_model(spec.speculation.model, roots, attempts_dir)
        updates["speculation"] = spec.speculation.model_copy(update={"model": draft})
    return spec.model_copy(update=updates)


def _confine_data(data: TrainData, roots: Sequence[Path]) -> TrainData:
    """Return the data with every file path resolved and checked to be below a root.

    Raises:
        LaunchRefusedError: a path is outside of every root.
    """
    if isinstance(data, FileData):
        return data.model_copy(update={"path": str(_path_below(data.path, roots))})
    if not isinstance(data, MixedData):
        return data
    parts = [
        part.model_copy(update={"data": _confine_data(part.data, roots)}) for part in data.parts
    ]
    return data.model_copy(update={"parts": tuple(parts)})


def confine_model(model: ModelRef, roots: Sequence[Path], attempts_dir: Path) -> ModelRef:
    """Return the reference with its folder resolved and checked to be below a root.

    Raises:
        LaunchRefusedError: the folder is outside of every root, or does not exist.
    """
    if isinstance(model, FolderModel):
        return FolderModel(path=str(_resolve_below(model.path, roots)))
    if isinstance(model, ArtefactModel):
        for part in (model.attempt_id, model.name):
            _refuse_unsafe_name(part)
        _require_folder(attempts_dir / model.attempt_id / "output" / model.name)
    return model


def refuse_missing(names: Sequence[str], values: Mapping[str, str]) -> None:
    """Raise if the team no longer has a secret that the job names.

    Raises:
        LaunchRefusedError: with the names.
    """
    if missing := [name for name in names if name not in values]:
        raise LaunchRefusedError(
            Reason.PREFLIGHT_FAILED,
            f"the team has no secret {', '.join(missing)}; store it under Secrets, or launch "
            "the job without it",
        )


def _resolve_below(text: str, roots: Sequence[Path], what: str = "model folder") -> Path:
    path = _path_below(text, roots)
    _require_folder(path, what)
    return path


def _path_below(text: str, roots: Sequence[Path]) -> Path:
    if "\0" in text or not roots:
        raise LaunchRefusedError(Reason.PREFLIGHT_FAILED, f"path {text!r} is not usable")
    path = (roots[0] / text).resolve()
    if not any(path.is_relative_to(root.resolve()) for root in roots):
        listed = ", ".join(str(root) for root in roots)
        raise LaunchRefusedError(
            Reason.PREFLIGHT_FAILED,
            f"path {text!r} is outside of this host's model folders ({listed}); "
            'move it there, or add its folder to "model_roots" in config.json',
        )
    return path


def _require_folder(path: Path, what: str = "model folder") -> None:
    if not path.is_dir():
        raise LaunchRefusedError(
            Reason.MODEL_OR_DATA_MISSING, f"{what} {path} is not on this host"
        )


def _refuse_unsafe_name(name: str) -> None:
    is_plain = name.replace("-", "").replace("_", "").replace(".", "").isalnum()
    if not (is_plain and name.isascii() and not name.startswith(".")):
        raise LaunchRefusedError(
            Reason.PREFLIGHT_FAILED,
            f"{name!r} is not the name of an artefact: letters, digits, '-', '_', '.' only",
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
