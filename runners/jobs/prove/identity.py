"""Stage "identity": the device, and whether the driver and torch see the same ones."""

import os
import platform
from pathlib import Path

import torch

from runners.jobs.prove.recorder import Recorder
from runners.jobs.runtime import num_threads

CPU_INFO = Path("/proc/cpuinfo")


def run(recorder: Recorder, folder: Path) -> None:
    """Record the device's name and memory, and compare NVML or amdsmi with torch."""
    del folder
    device = recorder.device
    if device.type != "cuda":
        _cpu(recorder)
        return
    properties = torch.cuda.get_device_properties(device)
    recorder.figure("memory", "bytes", [float(properties.total_memory)], properties.name)


def _cpu(recorder: Recorder) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    recorder.figure("memory", "bytes", [float(memory)], cpu_name())
    recorder.figure("threads", "threads", [float(num_threads())])
    recorder.check(
        "torch computes with the job's threads",
        is_met=torch.get_num_threads() == num_threads(),
        expected=f"{num_threads()} threads",
        found=f"{torch.get_num_threads()}",
    )


def cpu_name() -> str:
    """Return the processor's model name."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
