"""Runs one stage and prints its records: ``python -m runners.jobs.prove.stage STAGE FOLDER``."""

import argparse
import contextlib
import importlib
import os
import platform
from pathlib import Path

import torch

from runners.jobs.prove.recorder import Recorder, records_only_on_stdout
from runners.jobs.runtime import prepare_process
from runners.prove.report import HARDWARE, STAGES

CPU_INFO = Path("/proc/cpuinfo")
KERNEL_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def main(arguments: list[str] | None = None) -> None:
    """Run the stage in argv."""
    parser = argparse.ArgumentParser(prog="python -m runners.jobs.prove.stage")
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("folder", type=Path, help="where the stage may write")
    parser.add_argument("--device", default="", help="cpu, cuda:0 ...; default: the first GPU")
    parser.add_argument("--seconds", type=float, default=120.0, help="the stage's time limit")
    parser.add_argument("--small", action="store_true", help="the smallest sizes")
    options = parser.parse_args(arguments)
    out = records_only_on_stdout()
    # Torch's shared cache would keep the half-written kernel of a stage that was killed, and every
    # later compilation on this host would fail on it.
    os.environ[KERNEL_CACHE] = str(options.folder / "kernels")
    prepare_process()
    name = options.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    recorder = Recorder(out, device, options.seconds, is_small=options.small)
    recorder.figure(HARDWARE, "bytes", [float(_memory_bytes(device))], _name(device))
    stage = importlib.import_module(f"runners.jobs.prove.{options.stage}")
    stage.run(recorder, options.folder)


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _name(device: torch.device) -> str:
    """Return a device's name as its driver or the kernel tells it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    with contextlib.suppress(OSError):
        for line in CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
