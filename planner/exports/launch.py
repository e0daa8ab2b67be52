"""The launch command of a plan for cluster managers, its image, and a Slurm batch script."""

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from planner.exports.export import (
    RANK,
    SERVING_PORT,
    ExportCase,
    Format,
    Notes,
    server_of,
    servers_per_node,
    servers_text,
    shell_lines,
)
from planner.exports.llama_cpp import llama_cpp_arguments, llama_cpp_notes
from planner.exports.megatron import megatron_arguments, megatron_environment, megatron_notes
from planner.exports.sglang import servers, sglang_arguments, sglang_notes
from planner.exports.tensorrt_llm import (
    OPTIONS_FILE,
    trtllm_arguments,
    trtllm_notes,
    trtllm_options,
)
from planner.exports.train_script import FILE, torchrun_arguments, torchrun_notes, train_script
from planner.exports.vllm import vllm_arguments, vllm_notes, vllm_text
from planner.exports.yaml_text import yaml_text


@dataclass(frozen=True)
class Server:
    """A serving engine: its command, its notes, and its image by device vendor.

    ``host`` are the arguments to accept connections from other machines, for servers that listen
    on loopback by default. ``program`` is the executable's path in the images, if it is not on
    PATH. ``servers`` is the number of servers of a plan, where its replicas are separate ones.
    """

    arguments: Callable[[ExportCase], list[str]]
    notes: Callable[[ExportCase], Notes]
    images: dict[str, str]
    host: tuple[str, ...] = ()
    program: str | None = None
    servers: Callable[[ExportCase], int] = lambda _: 1


def replicas(case: ExportCase) -> int:
    """Return the data-parallel replicas of a plan."""
    return case.size("data")


# SGLang 0.5.23, TensorRT-LLM 00209af and llama.cpp b11434 listen on loopback by default.
ANY_HOST = ("--host", "0.0.0.0")  # noqa: S104 - inside a container, whose ports are mapped
OPEN_TAG = "TAG"
# Tags are those of releases: vLLM 0.33.0 and SGLang 0.5.23 on PyPI (2026-11). Whether a registry
# still serves a tag is not checked.
SERVERS = {
    "vllm": Server(
        vllm_arguments,
        vllm_notes,
        {
            "nvidia": "vllm/vllm-openai:v0.33.0",
            "amd": "rocm/vllm",
            "cpu": "vllm/vllm-openai-cpu:v0.33.0",
        },
    ),
    "sglang": Server(
        sglang_arguments,
        sglang_notes,
        {"nvidia": "lmsysorg/sglang:v0.5.23", "amd": "lmsysorg/sglang"},
        ANY_HOST,
        servers=servers,
    ),
    "tensorrt_llm": Server(
        trtllm_arguments,
        trtllm_notes,
        {"nvidia": "nvcr.io/nvidia/tensorrt-llm/release:1.2.1"},
        ANY_HOST,
        servers=replicas,
    ),
    "llama_cpp": Server(
        llama_cpp_arguments,
        llama_cpp_notes,
        {
            "nvidia": "ghcr.io/ggml-org/llama.cpp:server-cuda-b11434",
            "amd": "ghcr.io/ggml-org/llama.cpp:server-rocm-b11434",
            "intel": "ghcr.io/ggml-org/llama.cpp:server-intel-b11434",
            "cpu": "ghcr.io/ggml-org/llama.cpp:server-b11434",
        },
        ANY_HOST,
        "/app/llama-server",  # llama.cpp 1cad66d, .devops/cpu.Dockerfile and its siblings
        servers=replicas,
    ),
}
PYTORCH = "pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime"
TRAINING_IMAGES = {"nvidia": PYTORCH, "amd": "rocm/pytorch", "cpu": PYTORCH}


def is_training(case: ExportCase) -> bool:
    """Return whether the plan is for training."""
    return case.workload.kind == "train"


def server_name(case: ExportCase) -> str:
    """Return the serving engine to start: the plan's, or the default for the device."""
    return server_of(case.plan.engine, case.device)


def launch_arguments(case: ExportCase, *, contained: bool = False) -> list[str]:
    """Return the command of one node; a contained server accepts outside connections."""
    if runs_megatron(case):
        return megatron_arguments(case)
    if is_training(case):
        return torchrun_arguments(case.nodes, case.devices_per_node, FILE)
    command = _server_command(case, contained=contained)
    return command if server_name(case) == "vllm" else [*command, "--port", str(SERVING_PORT)]


def _server_command(case: ExportCase, *, contained: bool) -> list[str]:
    server = SERVERS[server_name(case)]
    program, *options = server.arguments(case)
    if not contained:
        return [program, *options]
    return [server.program or program, *options, *server.host]


def launch_script(case: ExportCase, *, contained: bool = False) -> str | None:
    """Return the command as shell if it needs the node's rank or starts several servers."""
    if is_training(case):
        return None
    if server_name(case) == "vllm":
        return vllm_text(case) if case.nodes > 1 else None
    separate = separate_servers(case)
    if servers_per_node(case, separate) > 1:
        return servers_text(case, _server_command(case, contained=contained), separate)
    command = launch_arguments(case, contained=contained)
    return shell_lines(command) if RANK in command else None


def separate_servers(case: ExportCase) -> int:
    """Return the servers that the plan's replicas are; 1 for training."""
    return 1 if is_training(case) else SERVERS[server_name(case)].servers(case)


def runs_megatron(case: ExportCase) -> bool:
    """Return whether a training plan needs Megatron-LM's parallelism."""
    axes = ("tensor", "pipeline", "context", "expert")
    return is_training(case) and any(case.size(axis) > 1 for axis in axes)


def launch_files(case: ExportCase) -> dict[str, str]:
    """Return the files that the command reads, by name."""
    if is_training(case):
        return {} if runs_megatron(case) else {FILE: train_script(case)}
    if server_name(case) == "tensorrt_llm" and trtllm_options(case):
        return {OPTIONS_FILE: yaml_text(trtllm_options(case))}
    return {}


def launch_environment(case: ExportCase) -> dict[str, str]:
    """Return the environment variables that the command requires, by name."""
    return megatron_environment(case) if runs_megatron(case) else {}


def launch_notes(case: ExportCase) -> Notes:
    """Return notes on settings that the command leaves to the user."""
    if runs_megatron(case):
        return ("Megatron-LM must lie in the working directory", *megatron_notes(case))
    return torchrun_notes(case) if is_training(case) else SERVERS[server_name(case)].notes(case)


def vendor_of(case: ExportCase) -> str:
    """Return the device's vendor in lower case; ``cpu`` for a CPU."""
    return "cpu" if case.device.kind == "cpu" else (case.device.vendor or "nvidia").lower()


def image_of(case: ExportCase) -> str | None:
    """Return the public image of the engine for the device, if there is one.

    Its tag is that of the release whose options the export writes; where releases have no tag of
    one form, ``TAG`` stands for the one to choose.
    """
    images = TRAINING_IMAGES if is_training(case) else SERVERS[server_name(case)].images
    image = images.get(vendor_of(case))
    return image if image is None or ":" in image else f"{image}:{OPEN_TAG}"


# Export a plan as a Slurm batch script: one task per node, the command under ``srun``.


MARGIN = 1.2
NEWLINE = "\n"


def slurm_text(case: ExportCase) -> str:
    """Return the script for ``sbatch``."""
    environment = {"OMP_NUM_THREADS": "1", **launch_environment(case)}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    written = [f"cat > {name} <<'END'\n{text}END" for name, text in launch_files(case).items()]
    head = 'MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"'
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{line}" for line in _directives(case)),
            "",
            *exports,
            f"export {head}",
            *written,
            _command(case),
        ]
    )


def _directives(case: ExportCase) -> list[str]:
    name = case.model.rstrip("/").rsplit("/", 1)[-1]
    lines = [
        f"job-name={name}-{case.workload.kind}",
        f"nodes={case.nodes}",
        "ntasks-per-node=1",
    ]
    if case.device.kind != "cpu":
        lines.append(f"gpus-per-node={case.devices_per_node}")
    lines.append("exclusive")
    segment = _segment(case)
    if segment:
        lines.append(f"segment={segment}")
    seconds = case.plan.performance.duration_seconds
    if is_training(case) and seconds:
        found = case.plan.reliability
        duration = case.plan.interval.get("duration_seconds", (seconds, seconds))
        high = found.wall_interval[1] if found else duration[1]
        lines.append(f"time={_limit(high * MARGIN)}")
    return lines


def _segment(case: ExportCase) -> int | None:
    """Return the nodes that Slurm is to take of each NVLink domain, None where nodes are domains.

    Slurm's block topology places each segment in one block, which is a domain. All segments have
    the same number of nodes. Source: slurm.schedmd.com/sbatch.html, ``--segment``.
    """
    cluster = case.plan.cluster
    inside = cluster.domain_devices // cluster.devices_per_node
    domains = math.ceil(case.nodes / inside)
    is_even = inside > 1 and case.nodes > 1 and case.nodes % domains == 0
    return case.nodes // domains if is_even else None


def _limit(seconds: float) -> str:
    """Return a time limit as days-hours:minutes:seconds, rounded up to minutes.

    >>> _limit(93600)
    '1-02:00:00'
    """
    minutes = int(-(-seconds // 60))
    days, minutes = divmod(minutes, 24 * 60)
    return f"{days}-{minutes // 60:02}:{minutes % 60:02}:00"


def _command(case: ExportCase) -> str:
    script = launch_script(case)
    if script is None:
        return shell_lines(["srun", *launch_arguments(case)])
    # The rank exists only in the task, so the task's shell expands it.
    return f"srun bash -c {shlex.quote('NODE_RANK=$SLURM_NODEID' + NEWLINE + script)}{NEWLINE}"


def slurm_notes(case: ExportCase) -> Notes:
    """Return notes on settings that the script leaves to the user."""
    notes = ["add the partition and the account of your cluster"]
    if case.plan.performance.duration_seconds is None or not is_training(case):
        notes.append("no time limit: the plan does not say how long it runs")
    return (*notes, *launch_notes(case))


SLURM = Format("slurm", "Slurm", "job.sbatch", slurm_text, slurm_notes)
