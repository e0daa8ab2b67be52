"""Stage "identity": the devices, and whether their driver and torch tell the same.

Clocks, power, temperature and what slows a GPU down are read while it computes, so that a
throttled or a capped one is seen.
"""

import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from runners.jobs.bench.device_rates import product_of, wait_for
from runners.jobs.prove.recorder import Recorder
from runners.jobs.runtime import num_threads

if TYPE_CHECKING:
    from runners.host.inventory import Device, TorchDevice

LOAD_SECONDS = 2.0
LOAD_SIZE = 8192
LEAST_CLOCK = 0.75  # of the highest clock, while it computes
OTHER_DEVICES = (
    "Restart the host; set CUDA_DEVICE_ORDER=PCI_BUS_ID; look for CUDA_VISIBLE_DEVICES in the "
    "agent's unit. Until they agree a job may run on another GPU than the one it leases."
)
COOLING = "Look at cooling, power supply and power limit (nvidia-smi -q -d PERFORMANCE,POWER)."


def run(recorder: Recorder, folder: Path) -> None:
    """Record the devices and check that driver and torch agree on them."""
    del folder
    if recorder.device.type != "cuda":
        _cpu(recorder)
        return
    with recorder.part("devices", advice="Install the driver's management library."):
        _gpus(recorder)


def _gpus(recorder: Recorder) -> None:
    from runners.host import inventory

    library = "amdsmi" if torch.version.hip else "pynvml"
    if importlib.util.find_spec(library) is None:
        package = {"pynvml": "nvidia-ml-py"}.get(library, library)
        why = f"{library} is not installed, so the driver was not asked"
        recorder.missing("devices of the driver", why, f"pip install {package}", "library")
        return
    for problem in inventory.devices().problems:
        recorder.check("driver", is_met=False, expected="to tell every device", found=problem)
    found, seen = inventory.devices_here(), seen_by_torch()
    differences = inventory.device_differences(found, seen)
    recorder.check(
        "driver and torch see the same devices",
        is_met=not differences,
        expected=f"{len(found)} GPUs: {', '.join(each.name for each in found)}",
        found="; ".join(differences) or "the same",
        advice=OTHER_DEVICES,
    )
    for each in _under_load(recorder) if found else ():
        _state(recorder, each)


def seen_by_torch() -> "list[TorchDevice]":
    """Return every device as torch describes it."""
    from runners.host.inventory import TorchDevice

    every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        TorchDevice(each.name, str(getattr(each, "uuid", "")), int(each.total_memory))
        for each in every
    ]


def _under_load(recorder: Recorder) -> "Sequence[Device]":
    """Return the devices' state while every one of them multiplies matrices."""
    from runners.host.inventory import devices_here

    size = 256 if recorder.is_small else LOAD_SIZE
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    products = [product_of("bf16", device, size) for device in devices]
    deadline = time.monotonic() + (0.1 if recorder.is_small else LOAD_SECONDS)
    while time.monotonic() < deadline:
        for product in products:
            product.compute()
        wait_for(recorder.device)
    for product in products:  # the queue is not empty while the state is read
        for _ in range(20):
            product.compute()
    return devices_here()


def _state(recorder: Recorder, device: "Device") -> None:
    """Record one GPU's clock, power, temperature and links, and check what slows it down."""
    name = f"GPU {device.index}"
    for title, unit, value in (
        ("clock under load", "Hz", device.clock_hertz),
        ("power under load", "W", device.power_watts),
        ("temperature under load", "°C", device.temperature_celsius),
    ):
        if value is not None:
            recorder.figure(f"{name}: {title}", unit, [value], device.name)
    recorder.check(
        f"{name}: nothing slows it down",
        is_met=not device.slowed_by,
        expected="no reason for a lower clock",
        found=", ".join(device.slowed_by) or "none",
        advice=COOLING,
    )
    clock, most = device.clock_hertz, device.max_clock_hertz
    if clock and most and not recorder.is_small:
        recorder.check(
            f"{name}: clock under load",
            is_met=clock >= LEAST_CLOCK * most,
            expected=f"at least {LEAST_CLOCK:.0%} of {most / 1e6:.0f} MHz",
            found=f"{clock / 1e6:.0f} MHz",
            advice=COOLING,
        )
    for unread in device.unread:
        recorder.missing(f"{name}: {unread}", "its driver does not tell")


def _cpu(recorder: Recorder) -> None:
    recorder.figure("threads", "threads", [float(num_threads())])
    recorder.check(
        "torch computes with the job's threads",
        is_met=torch.get_num_threads() == num_threads(),
        expected=f"{num_threads()} threads",
        found=f"{torch.get_num_threads()}",
    )
    with recorder.part("GPUs that torch does not use"):
        from runners.host import inventory

        for gpu in inventory.devices().gpus:
            recorder.check(
                "torch uses the GPU",
                is_met=False,
                expected=f"torch to see {gpu.name}",
                found="a torch without this GPU",
                advice="Install torch for the driver's CUDA or ROCm.",
            )
