"""The command that a cluster manager starts for a plan, and the container image for it."""

from collections.abc import Callable
from dataclasses import dataclass

from planner.exports.case import RANK, ExportCase
from planner.exports.export import Notes, shell_lines
from planner.exports.llama_cpp import llama_cpp_arguments, llama_cpp_notes
from planner.exports.sglang import sglang_arguments, sglang_notes
from planner.exports.tensorrt_llm import (
    OPTIONS_FILE,
    trtllm_arguments,
    trtllm_notes,
    trtllm_options,
)
from planner.exports.torchrun import torchrun_arguments, torchrun_notes, training_environment
from planner.exports.vllm import vllm_arguments, vllm_notes, vllm_text
from planner.exports.yaml_text import yaml_text


@dataclass(frozen=True)
class Server:
    """A serving engine: its command, its notes, and its image by the vendor of the device."""

    arguments: Callable[[ExportCase], list[str]]
    notes: Callable[[ExportCase], Notes]
    images: dict[str, str]


SERVERS = {
    "vllm": Server(
        vllm_arguments,
        vllm_notes,
        {"nvidia": "vllm/vllm-openai", "amd": "rocm/vllm", "cpu": "vllm/vllm-openai-cpu"},
    ),
    "sglang": Server(
        sglang_arguments,
        sglang_notes,
        {"nvidia": "lmsysorg/sglang", "amd": "lmsysorg/sglang"},
    ),
    "tensorrt_llm": Server(
        trtllm_arguments,
        trtllm_notes,
        {"nvidia": "nvcr.io/nvidia/tensorrt-llm/release"},
    ),
    "llama_cpp": Server(
        llama_cpp_arguments,
        llama_cpp_notes,
        {
            "nvidia": "ghcr.io/ggml-org/llama.cpp:server-cuda",
            "amd": "ghcr.io/ggml-org/llama.cpp:server-rocm",
            "intel": "ghcr.io/ggml-org/llama.cpp:server-intel",
            "cpu": "ghcr.io/ggml-org/llama.cpp:server",
        },
    ),
}
TRAINING_IMAGES = {"nvidia": "pytorch/pytorch", "amd": "rocm/pytorch", "cpu": "pytorch/pytorch"}


def is_training(case: ExportCase) -> bool:
    """Return whether the plan trains."""
    return case.workload.kind == "train"


def server_name(case: ExportCase) -> str:
    """Return the serving engine to start: the plan's own, else the usual one for the device."""
    if case.plan.engine in SERVERS:
        return case.plan.engine
    return "llama_cpp" if case.device.kind in {"cpu", "uma"} else "vllm"


def launch_arguments(case: ExportCase) -> list[str]:
    """Return the command of one node."""
    if is_training(case):
        return torchrun_arguments(case.nodes, case.devices_per_node, "train.py")
    return SERVERS[server_name(case)].arguments(case)


def launch_script(case: ExportCase) -> str | None:
    """Return the command as shell where a node must know its own number, else nothing."""
    if is_training(case) or case.nodes == 1:
        return None
    if server_name(case) == "vllm":
        return vllm_text(case)
    command = launch_arguments(case)
    return shell_lines(command) if RANK in command else None


def launch_environment(case: ExportCase) -> dict[str, str]:
    """Return what the command needs in its environment beside the addresses of the nodes."""
    return training_environment(case) if is_training(case) else {}


def launch_files(case: ExportCase) -> dict[str, str]:
    """Return the files that the command reads, by name."""
    if not is_training(case) and server_name(case) == "tensorrt_llm" and trtllm_options(case):
        return {OPTIONS_FILE: yaml_text(trtllm_options(case))}
    return {}


def launch_notes(case: ExportCase) -> Notes:
    """Return what the command itself leaves open."""
    return torchrun_notes(case) if is_training(case) else SERVERS[server_name(case)].notes(case)


def vendor_of(case: ExportCase) -> str:
    """Return who made the device, lower case; ``cpu`` for a processor."""
    return "cpu" if case.device.kind == "cpu" else (case.device.vendor or "nvidia").lower()


def image_of(case: ExportCase) -> str | None:
    """Return the public image that has the engine for the device, where there is one."""
    images = TRAINING_IMAGES if is_training(case) else SERVERS[server_name(case)].images
    found = images.get(vendor_of(case))
    return found if found is None or ":" in found else f"{found}:latest"
