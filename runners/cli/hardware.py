"""The hardware that ``--on`` names: devices of the catalog, cloud offers, this machine."""

import datetime as dt
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from planner.catalog.devices import DriverDevice, MeasuredRates, host_device
from planner.catalog.hardware_names import Hardware, read_hardware
from planner.specs.base import UnknownDeviceError
from planner.specs.cluster import DeviceSpec
from runners.cli.config import data_folder, write_private
from runners.cli.errors import CliError, ExitCode, planner_errors
from runners.cli.quantities import size

THIS, RAM = "this", "ram"
MEASURED_FILE = "this-machine.json"
BUSY_LOAD = 0.5  # programs on each core, from which on they slow a measurement
Cluster = dict[str, Any]  # the JSON of a ClusterSpec


def parse_hardware(text: str, option: str = "--on") -> Cluster:
    """Return the cluster that a text names, as the JSON of a ClusterSpec.

    Raises:
        CliError: nothing has this name, or a count or an option of it is wrong.
    """
    return read_hardware_option(text, option).cluster


def read_hardware_option(text: str, option: str = "--on") -> Hardware:
    """Return the cluster that a text names, and what was assumed of it.

    After a comma ``ram`` is the memory of each host: ``rtx-4060,ram=32GB``.

    Raises:
        CliError: nothing has this name, or a count or an option of it is wrong.
    """
    name, *parts = (part.strip() for part in text.split(","))
    given = [part.partition("=") for part in parts]
    if any(key.strip().lower() != RAM or not value for key, _, value in given):
        raise CliError(
            f"{option} is {text!r}: after a comma it takes {RAM}=SIZE, the memory of each host, "
            f"such as {name},{RAM}=64GB",
            field=option,
        )
    if name.lower() == THIS:
        found = Hardware(this_machine())
    else:
        try:
            with planner_errors():
                found = read_hardware(name, option)
        except CliError as error:
            if error.code != UnknownDeviceError.code:
                raise
            words = f"{error.detail}, or this; `slipway devices find TEXT` searches"
            raise CliError(words, code=error.code, field=option) from error
    for _, _, value in given:
        found.cluster["host_memory_bytes"] = size(f"{option} {RAM}", value)
    return found


# This machine: its GPUs by their drivers, else its CPU by a short measurement.


def this_machine() -> Cluster:
    """Return this machine as a cluster of one node: its first kind of GPU, else its CPU.

    Raises:
        CliError: the catalog does not know the GPU.
    """
    memory_bytes = host_memory_bytes()
    gpus = list(_gpus())
    if not gpus:
        device = _this_cpu()
        return {"device": device.model_dump(mode="json"), "host_memory_bytes": memory_bytes}
    same = [gpu for gpu in gpus if gpu.name == gpus[0].name]
    device_spec = host_device(
        DriverDevice(
            same[0].name,
            "gpu",
            same[0].memory_bytes,
            is_partition=bool(same[0].partition),
            shares_host_memory=same[0].shares_host_memory,
        ),
        None,
    ).datasheet
    if device_spec is None:
        raise CliError(
            f"this machine's GPU {same[0].name!r} is not in the catalog: give it as an object "
            "with memory_bytes, memory_bandwidth_bytes_per_second and peak_flops_per_second, "
            "such as --set 'cluster.device={…}'",
            code="unknown_device",
            exit_code=ExitCode.FAILED,
        )
    return {
        "device": device_spec.model_dump(mode="json"),
        "devices_per_node": 1 if same[0].parent_uuid else len(same),
        "host_memory_bytes": memory_bytes,
    }


def _gpus() -> tuple[Any, ...]:
    """Return this machine's GPUs; none if the packages that read them are not installed."""
    try:
        from runners.host.inventory import devices
    except ImportError:  # psutil, of the extra "worker"
        return ()
    return devices().gpus


def host_memory_bytes() -> int:
    """Return the memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """Return the model of this machine's processor and its usable cores."""
    import platform

    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = usable_cores()
    return f"{named[0] if named else model} ({cores} core{'s' if cores > 1 else ''})"


class MeasuredMachine(NamedTuple):
    """This machine's CPU with measured rates, the instant, and the load of each core then."""

    device: DeviceSpec
    measured_at: dt.datetime
    load_per_core: float

    @property
    def was_busy(self) -> bool:
        """Return whether other programs took much of the cores, so that the rates are too low."""
        return self.load_per_core > BUSY_LOAD


def kept_rates() -> MeasuredMachine | None:
    """Return the rates that are kept of this machine, None if there are none or of another."""
    try:
        kept = json.loads((data_folder() / MEASURED_FILE).read_bytes())
        found = MeasuredMachine(
            DeviceSpec.model_validate(kept["device"]),
            dt.datetime.fromisoformat(kept["measured_at"]),
            float(kept["load_per_core"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    is_this = (found.device.name, found.device.memory_bytes) == (cpu_name(), host_memory_bytes())
    return found if is_this else None


def measure_this_machine() -> MeasuredMachine:
    """Measure this machine's CPU, and keep its rates for the next plan.

    Raises:
        CliError: the file cannot be written.
    """
    load, now = load_per_core(), dt.datetime.now(dt.UTC)
    described = DriverDevice(cpu_name(), "cpu", host_memory_bytes())
    rates = measure_cpu()
    if load > BUSY_LOAD:
        rates = rates._replace(source=f"{rates.source}, at a load of {load:.1f} on each core")
    device = host_device(described, rates).measured
    if device is None:  # measured rates always make a device
        raise CliError("this machine's CPU gave no rates", exit_code=ExitCode.FAILED)
    document = {
        "device": device.model_dump(mode="json"),
        "measured_at": now.isoformat(),
        "load_per_core": load,
    }
    write_private(data_folder() / MEASURED_FILE, json.dumps(document, indent=1))
    return MeasuredMachine(device, now, load)


def load_per_core() -> float:
    """Return the mean number of running programs of the last minute, for each usable core."""
    try:
        return os.getloadavg()[0] / usable_cores()
    except (OSError, AttributeError):  # not on Windows
        return 0.0


def _this_cpu() -> DeviceSpec:
    """Return this machine's CPU with the kept rates, or new ones where those were disturbed."""
    kept = kept_rates()
    if kept is None or (kept.was_busy and load_per_core() < kept.load_per_core / 2):
        kept = measure_this_machine()
    return kept.device


COPY_BYTES = 2**27
PRODUCT = 1024  # rows, columns and depth of a matrix product
RUNS = 5
COPY_STREAMS, FLOPS_PER_MULTIPLY_ADD = 2, 2


def measure_cpu() -> MeasuredRates:
    """Return what all usable cores achieve: a copy in bytes/s, fp32 products in FLOP/s.

    It takes about half a second. The agent's micro-benchmark, which a host runs, also measures
    other dtypes and the time to issue an operator.
    """
    import concurrent.futures

    import numpy as np

    cores = usable_cores()
    source = np.ones(COPY_BYTES // 4, dtype=np.float32)
    target = np.empty_like(source)
    parts = list(zip(np.array_split(source, cores), np.array_split(target, cores), strict=True))
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:

        def copy() -> None:
            list(pool.map(lambda part: np.copyto(part[1], part[0]), parts))

        bandwidth = COPY_STREAMS * COPY_BYTES / _best_seconds(copy)
    matrix = np.ones((PRODUCT, PRODUCT), dtype=np.float32)
    out = np.empty_like(matrix)
    seconds = _best_seconds(lambda: np.matmul(matrix, matrix, out=out))
    return MeasuredRates(
        memory_bandwidth_bytes_per_second=bandwidth,
        flops_per_second={"fp32": FLOPS_PER_MULTIPLY_ADD * PRODUCT**3 / seconds},
        source="numpy on this machine: a copy and an fp32 matrix product",
        as_of=dt.datetime.now(dt.UTC).date().isoformat(),
    )


def _best_seconds(operation: Callable[[], object]) -> float:
    """Return the wall seconds of the fastest run, which other programs disturb least."""
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        operation()
        times.append(time.perf_counter() - began)
    return min(times)
