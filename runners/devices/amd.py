"""AMD GPUs and their partitions, read through amdsmi or its command-line programs."""

import importlib
import itertools
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planner.specs.units import MIB
from runners.devices.topology import (
    CUDA,
    HIP,
    ROCR,
    SAME,
    SELF,
    UNKNOWN,
    CommandUnavailableError,
    read_json,
    rocm_visible,
)
from runners.shared.facts import GpuFacts
from runners.shared.machine import machine_id
from runners.shared.messages import GpuLoad
from runners.supervision import procfs

# What ``amd-smi`` or ``rocm-smi`` prints as JSON, in the form of the library amdsmi.
#
# For hosts whose ROCm has a command and whose environment has no amdsmi; before ROCm 6 that is
# rocm-smi. Links between GPUs and processes are not in these answers.


STATIC = ("amd-smi", "static", "--json")
METRIC = ("amd-smi", "metric", "--json")
ROCM_SMI = (
    "rocm-smi", "--showproductname", "--showuniqueid", "--showbus", "--showmeminfo", "vram",
    "--showmaxpower", "--showpower", "--showuse", "--showtemp", "--showdriverversion", "--json",
)  # fmt: skip


class MissingValueError(Exception):
    """The command does not print this value."""


class CommandLibrary:
    """amdsmi's queries, answered from the command's output."""

    AmdSmiException = MissingValueError

    class AmdSmiClkType:
        """The clocks that the command prints."""

        GFX, MEM = "gfx_0", "mem_0"

    class AmdSmiTemperatureType:
        """The temperatures that the command prints."""

        HOTSPOT, EDGE = "hotspot", "edge"

    class AmdSmiTemperatureMetric:
        """The one kind of temperature that is asked for."""

        CURRENT = 0

    def __init__(self, static: list[dict[str, Any]], metric: list[dict[str, Any]]) -> None:
        self._static = static
        self._metric = metric if len(metric) == len(static) else [{} for _ in static]

    @classmethod
    def read(cls) -> "CommandLibrary":
        """Run amd-smi, or rocm-smi where that cannot be used.

        Raises:
            CommandUnavailableError: both are missing, fail, or print something else.
        """
        try:
            static = _gpus(read_json(STATIC))
        except CommandUnavailableError as reason:
            try:
                return cls(*_of_rocm_smi(read_json(ROCM_SMI)))
            except CommandUnavailableError as error:
                raise CommandUnavailableError(f"{reason}; {error}") from None
        try:
            return cls(static, _gpus(read_json(METRIC)))
        except CommandUnavailableError:
            return cls(static, [])

    def amdsmi_shut_down(self) -> None:
        """Do nothing: the command has ended."""

    def amdsmi_get_processor_handles(self) -> list[int]:
        return list(range(len(self._static)))

    def amdsmi_get_gpu_asic_info(self, handle: int) -> dict[str, Any]:
        return self._group(self._static, handle, "asic")

    def amdsmi_get_gpu_device_bdf(self, handle: int) -> str:
        return str(self._group(self._static, handle, "bus")["bdf"])

    def amdsmi_get_gpu_driver_info(self, handle: int) -> dict[str, Any]:
        return {"driver_version": self._group(self._static, handle, "driver").get("version")}

    def amdsmi_get_gpu_vram_usage(self, handle: int) -> dict[str, Any]:
        size = self._group(self._static, handle, "vram").get("size")
        usage = self._metric[handle].get("mem_usage") or {}
        return {"vram_total": _value(size), "vram_used": _value(usage.get("used_vram"))}

    def amdsmi_get_gpu_compute_partition(self, handle: int) -> str:
        group = self._group(self._static, handle, "partition")
        return str(group.get("accelerator_partition") or group.get("compute_partition") or "")

    def amdsmi_get_gpu_memory_partition(self, handle: int) -> str:
        return str(self._group(self._static, handle, "partition").get("memory_partition") or "")

    def amdsmi_get_power_cap_info(self, handle: int) -> dict[str, Any]:
        limit = self._group(self._static, handle, "limit")
        cap = _value(limit.get("socket_power", limit.get("max_power")))
        return {"power_cap": cap, "default_power_cap": None}

    def amdsmi_get_pcie_info(self, handle: int) -> dict[str, Any]:
        bus = self._group(self._static, handle, "bus")
        version = str(bus.get("pcie_interface_version")).removeprefix("Gen ")
        generation = int(version) if version.isdecimal() else None
        width = (self._metric[handle].get("pcie") or {}).get("width")
        return {
            "pcie_static": {
                "max_pcie_width": bus.get("max_pcie_width"),
                "pcie_interface_version": generation,
            },
            "pcie_metric": {"pcie_width": width},
        }

    def amdsmi_get_clock_info(self, handle: int, kind: str) -> dict[str, Any]:
        clock = self._group(self._metric, handle, "clock")[kind]
        return {name: _value(clock.get(name)) for name in ("clk", "max_clk")}

    def amdsmi_get_gpu_activity(self, handle: int) -> dict[str, Any]:
        usage = self._group(self._metric, handle, "usage")
        return {"gfx_activity": _value(usage.get("gfx_activity"))}

    def amdsmi_get_power_info(self, handle: int) -> dict[str, Any]:
        return {
            "current_socket_power": _value(
                self._group(self._metric, handle, "power").get("socket_power")
            )
        }

    def amdsmi_get_temp_metric(self, handle: int, kind: str, _metric: object) -> Any:  # noqa: ANN401
        return _value(self._group(self._metric, handle, "temperature").get(kind))

    @staticmethod
    def _group(source: list[dict[str, Any]], handle: int, name: str) -> dict[str, Any]:
        group = source[handle].get(name)
        if not isinstance(group, dict):
            raise MissingValueError(f"amd-smi did not print {name}")
        return group


def _gpus(document: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Return the GPUs of the command's output, which ROCm 6.4 put below ``gpu_data``."""
    found = document.get("gpu_data") if isinstance(document, dict) else document
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise CommandUnavailableError("amd-smi prints another form of JSON than is known")
    return found


def _of_rocm_smi(document: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:  # noqa: ANN401
    """Return rocm-smi's answers as amd-smi groups them; rocm-smi prints numbers as text."""
    if not isinstance(document, dict):
        raise CommandUnavailableError("rocm-smi prints another form of JSON than is known")
    cards = sorted(
        (int(name.removeprefix("card")), card)
        for name, card in document.items()
        if name.removeprefix("card").isdecimal() and isinstance(card, dict)
    )
    system = document.get("system") or {}
    static = [
        {
            "asic": {
                "market_name": _first(card, "Card Series", "Card series", "Card Model"),
                "asic_serial": card.get("Unique ID", "N/A"),
                "target_graphics_version": _first(card, "GFX Version"),
            },
            "bus": {"bdf": str(_first(card, "PCI Bus")).lower()},
            "driver": {"version": system.get("Driver version")},
            "vram": {"size": _megabytes(card.get("VRAM Total Memory (B)"))},
            "limit": {"max_power": _real(card.get("Max Graphics Package Power (W)"))},
        }
        for _, card in cards
    ]
    metric = [
        {
            "usage": {"gfx_activity": _real(card.get("GPU use (%)"))},
            "mem_usage": {"used_vram": _megabytes(card.get("VRAM Total Used Memory (B)"))},
            "power": {"socket_power": _real(_first(card, *_ROCM_SMI_POWER))},
            "temperature": {
                "hotspot": _real(card.get("Temperature (Sensor junction) (C)")),
                "edge": _real(card.get("Temperature (Sensor edge) (C)")),
            },
        }
        for _, card in cards
    ]
    return static, metric


_ROCM_SMI_POWER = (
    "Current Socket Graphics Package Power (W)",
    "Average Graphics Package Power (W)",
)


def _first(card: dict[str, Any], *names: str) -> Any:  # noqa: ANN401
    """Return the first of a value's names that this release prints."""
    return next((card[name] for name in names if name in card), None)


def _real(text: object) -> float | None:
    try:
        return float(str(text))
    except ValueError:  # "N/A"
        return None


def _megabytes(text: object) -> float | None:
    found = _real(text)
    return None if found is None else found / MIB


def _value(entry: object) -> object:
    """Return a value that the command prints alone or with its unit."""
    return entry.get("value") if isinstance(entry, dict) else entry


MEGAHERTZ = 1_000_000
MICROWATTS = 1_000_000
PERCENT = 100
MAX_PLAUSIBLE_WATTS = 10_000  # releases before ROCm 6.1 gave limits in watts, later in microwatts
_NO_NODE = 0xFFFFFFFF
_XGMI, _PCIE = 2, 1  # amdsmi.h: amdsmi_link_type_t
_HOPS = {2: "NODE", 3: "SYS"}  # over PCIe, within a NUMA node and between two
_WHOLE = ("", "N/A", "SPX")
# amdgpu_smu.h: bits 32 to 47 of the throttle status are temperatures, bits 16 to 31 currents.
_HEAT, _CURRENT = 0xFFFF << 32, 0xFFFF << 16
_VIOLATIONS = ("socket_thrm", "vr_thrm", "hbm_thrm", "prochot_thrm")
Library = types.ModuleType


def is_amdsmi(library: object) -> bool:
    """Return whether a library is amdsmi, or what stands for it."""
    return hasattr(library, "amdsmi_get_processor_handles")


def open_library(problems: list[str] | None = None) -> Any | None:  # noqa: ANN401 - a module, or the command
    """Return the initialised amdsmi, or the command's answers; None without either.

    The import runs AMD's loader, which fails with errors of any type where ROCm is missing.
    """
    problems = [] if problems is None else problems
    try:
        library = importlib.import_module("amdsmi")
        library.amdsmi_init()
    except Exception as error:  # noqa: BLE001 - amdsmi 7.0 raises KeyError('libamd_smi.so')
        problems.append(f"amdsmi cannot be used: {type(error).__name__}: {error}")
    else:
        return library
    try:
        return CommandLibrary.read()
    except CommandUnavailableError as error:
        problems.append(str(error))
    return None


class Ask:
    """Asks amdsmi about one GPU, and notes what it does not answer."""

    def __init__(self, library: Any, handle: object) -> None:  # noqa: ANN401
        self._library, self._handle = library, handle
        self.unread: list[str] = []

    def __call__(self, name: str, *arguments: object, label: str = "") -> Any:  # noqa: ANN401
        """Return an answer, or None; ``label`` names a value to note."""
        try:
            return getattr(self._library, f"amdsmi_{name}")(self._handle, *arguments)
        except AttributeError:
            reason = "not in this amdsmi"
        except (self._library.AmdSmiException, KeyError, OSError, TypeError, ValueError) as error:
            reason = getattr(error, "err_info", None) or str(error)
        if label:
            self.unread.append(f"{label}: {reason}")
        return None


def _handles(library: Any) -> list[Any]:  # noqa: ANN401
    try:
        return list(library.amdsmi_get_processor_handles())
    except library.AmdSmiException:
        return []


def identifiers(library: Any) -> list[str]:  # noqa: ANN401
    """Return a unique name for each GPU: ROCR's UUID, or the PCI address where it has none.

    Partitions of one GPU have the same serial number; a number makes them different.
    """
    names: list[str] = []
    for handle in _handles(library):
        ask = Ask(library, handle)
        serial = str((ask("get_gpu_asic_info") or {}).get("asic_serial", "N/A"))
        named = str((ask("get_gpu_enumeration_info") or {}).get("hip_uuid") or "")
        if named.upper().startswith("GPU-") and named.upper() != "GPU-XX":
            name = f"GPU-{named[len('GPU-') :].lower()}"
        elif _is_number(serial, 16) and int(serial, 16):
            name = f"GPU-{int(serial, 16):016x}"
        else:
            where = (machine_id() or procfs.boot_id())[:12]
            name = f"PCI-{ask('get_gpu_device_bdf') or len(names)}-{where}"
        same = sum(each.partition("#")[0] == name for each in names)
        names.append(f"{name}#{same}" if same else name)
    return names


def _listed(library: Any, env: Mapping[str, str] = os.environ) -> list[tuple[int, Any, str]]:  # noqa: ANN401
    """Return index, handle and name of the GPUs that ROCm's variables select, in their order."""
    handles, names = _handles(library), identifiers(library)
    hip_ids = [
        _number((Ask(library, handle)("get_gpu_enumeration_info") or {}).get("hip_id"))
        for handle in handles
    ]
    known = [hip_id for hip_id in hip_ids if hip_id is not None]
    orders = known if len(set(known)) == len(handles) else list(range(len(handles)))
    found = sorted(zip(orders, handles, names, strict=True), key=lambda each: each[0])
    visible = rocm_visible([name for _, _, name in found], env)
    return [found[place] for place in visible]


def facts(library: Any, problems: list[str] | None = None) -> Iterator[GpuFacts]:  # noqa: ANN401
    """Yield the facts of every GPU and partition; unsupported values are None."""
    found, total = _listed(library), len(_handles(library))
    if problems is not None and len(found) < total:
        problems.append(
            f"{total - len(found)} of {total} GPUs are hidden by {ROCR}, {HIP} or {CUDA}"
        )
    for index, handle, name in found:
        ask = Ask(library, handle)
        asic = ask("get_gpu_asic_info", label="name") or {}
        bdf = ask("get_gpu_device_bdf", label="PCI address")
        errors = ask("get_gpu_total_ecc_count") or {}
        memory = _total_bytes(library, ask)
        if not memory:
            ask.unread.append("memory: the driver does not tell")
        yield GpuFacts(
            index=index,
            uuid=name,
            name=_market_name(asic),
            vendor="amd",
            architecture=_known(asic.get("target_graphics_version")),
            memory_bytes=memory,
            partition=_partition(ask),
            pci_bus_id=bdf,
            numa_node=_node(ask("topo_get_numa_node_number")),
            ecc_corrected_errors=_number(errors.get("correctable_count")),
            ecc_uncorrected_errors=_number(errors.get("uncorrectable_count")),
            **_limits(library, ask),
            **_pcie(ask),
            unread=tuple(ask.unread),
        )


def _market_name(asic: Mapping[str, Any]) -> str:
    name = _known(asic.get("market_name")) or "AMD GPU"
    return name if name.upper().startswith("AMD") else f"AMD {name}"


def _total_bytes(library: Any, ask: Ask) -> int:  # noqa: ANN401
    """Return a GPU's or partition's memory; amdsmi gives bytes in one query, MB in the other."""
    kind = getattr(getattr(library, "AmdSmiMemoryType", None), "VRAM", None)
    total = _number(ask("get_gpu_memory_total", kind)) if kind is not None else None
    usage = ask("get_gpu_vram_usage") or {}
    return int(total or (_number(usage.get("vram_total")) or 0) * MIB)


def _used_bytes(library: Any, ask: Ask) -> int:  # noqa: ANN401
    kind = getattr(getattr(library, "AmdSmiMemoryType", None), "VRAM", None)
    used = _number(ask("get_gpu_memory_usage", kind)) if kind is not None else None
    usage = ask("get_gpu_vram_usage") or {}
    return int((_number(usage.get("vram_used")) or 0) * MIB if used is None else used)


def _limits(library: Any, ask: Ask) -> dict[str, Any]:  # noqa: ANN401
    """Return power limits and highest clocks; the second die of an MI250 has no limit."""
    caps = ask("get_power_cap_info", label="power limit") or {}
    clock, memory = (
        _number((_clock(library, ask, kind) or {}).get("max_clk")) for kind in ("GFX", "MEM")
    )
    if clock is None:
        ask.unread.append("clocks: the driver does not tell")
    return {
        "power_limit_watts": _watts(caps.get("power_cap")),
        "default_power_limit_watts": _watts(caps.get("default_power_cap")),
        "max_clock_hertz": None if clock is None else float(clock * MEGAHERTZ),
        "max_memory_clock_hertz": None if memory is None else float(memory * MEGAHERTZ),
    }


def _clock(library: Any, ask: Ask, kind: str) -> dict[str, Any] | None:  # noqa: ANN401
    kinds = getattr(library, "AmdSmiClkType", None)
    found: dict[str, Any] | None = ask("get_clock_info", getattr(kinds, kind)) if kinds else None
    return found


def _pcie(ask: Ask) -> dict[str, Any]:
    info = ask("get_pcie_info", label="PCIe link") or {}
    static, metric = info.get("pcie_static") or {}, info.get("pcie_metric") or {}
    return {
        "pcie_width": _number(metric.get("pcie_width")),
        "pcie_max_width": _number(static.get("max_pcie_width")),
        "pcie_max_generation": _number(static.get("pcie_interface_version")),
    }


def _partition(ask: Ask) -> str | None:
    """Return a partitioned GPU's modes, such as "CPX/NPS4"."""
    compute = str(ask("get_gpu_compute_partition") or "")
    memory = str(ask("get_gpu_memory_partition") or "")
    return None if compute in _WHOLE else f"{compute}/{memory}" if memory else compute


def loads(library: Any) -> Iterator[GpuLoad]:  # noqa: ANN401
    """Yield the present state of every GPU; processes without attempt marker are foreign."""
    for _, handle, name in _listed(library):
        ask = Ask(library, handle)
        activity = ask("get_gpu_activity") or {}
        power = ask("get_power_info") or {}
        busy = _number(activity.get("gfx_activity"))
        watts = [
            _number(power.get(kind)) for kind in ("current_socket_power", "average_socket_power")
        ]
        yield GpuLoad(
            uuid=name,
            memory_used_bytes=_used_bytes(library, ask),
            utilization=(busy or 0) / PERCENT,
            power_watts=next((float(each) for each in watts if each), None),
            temperature_celsius=_temperature(library, ask),
            foreign_pids=tuple(
                pid
                for each in ask("get_gpu_process_list") or ()
                if isinstance(each, dict) and (pid := _number(each.get("pid")))
                if not procfs.is_marked(pid)
            ),
            slowed_by=_slowed_by(ask),
        )


def clocks(library: Any) -> dict[str, float]:  # noqa: ANN401
    """Return the present graphics clock of the GPUs that tell it, by name, in hertz."""
    found = {
        name: _number((_clock(library, Ask(library, handle), "GFX") or {}).get("clk"))
        for _, handle, name in _listed(library)
    }
    return {name: float(clock * MEGAHERTZ) for name, clock in found.items() if clock is not None}


def _temperature(library: Any, ask: Ask) -> float | None:  # noqa: ANN401
    kinds = getattr(library, "AmdSmiTemperatureType", None)
    metric = getattr(getattr(library, "AmdSmiTemperatureMetric", None), "CURRENT", None)
    for kind in ("HOTSPOT", "EDGE"):  # a die reports the one or the other
        if kinds and (found := _number(ask("get_temp_metric", getattr(kinds, kind), metric))):
            return float(found)
    return None


def _slowed_by(ask: Ask) -> tuple[str, ...]:
    """Return what holds the clocks down, without the usual power cap.

    From MI300 on the violation status says so. Before, and on Radeon, the metrics table does, of
    which amdsmi 7 tells whether any bit is set, so that heat and power cap are one.
    """
    status = _number((ask("get_gpu_metrics_info") or {}).get("indep_throttle_status"))
    if status is None:
        violations = ask("get_violation_status") or {}
        is_hot = any(violations.get(f"active_{kind}") is True for kind in _VIOLATIONS)
        return ("heat (hardware)",) if is_hot else ()
    reasons = {"heat (hardware)": status & _HEAT, "power brake": status & _CURRENT}
    return tuple(name for name, bits in reasons.items() if bits)


def matrix(library: Any) -> tuple[tuple[str, ...], ...]:  # noqa: ANN401
    """Return the connection type of each pair: XGMI, or NODE and SYS over PCIe.

    amdsmi counts one hop for all GPUs of a fabric, so the number of links is unknown.
    """
    return _pairs(library, _link, SELF)


def peer_access(library: Any) -> tuple[tuple[bool | None, ...], ...]:  # noqa: ANN401
    """Return a matrix: [i][j] is whether GPU i can access GPU j's memory directly.

    None on the diagonal, or where the driver does not tell; empty for fewer than two GPUs.
    """
    return _pairs(library, _accesses, None)


def _pairs(library: Any, read: Any, own: Any) -> tuple[tuple[Any, ...], ...]:  # noqa: ANN401
    found = _listed(library)
    if len(found) <= 1:
        return ()
    cells = {
        pair: read(library, found[pair[0]], found[pair[1]])
        for pair in itertools.permutations(range(len(found)), 2)
    }
    places = range(len(found))
    return tuple(tuple(cells.get((row, column), own) for column in places) for row in places)


def _link(library: Any, row: Sequence[Any], column: Sequence[Any]) -> str:  # noqa: ANN401
    if row[2].partition("#")[0] == column[2].partition("#")[0]:
        return SAME
    found = Ask(library, row[1])("topo_get_link_type", column[1]) or {}
    if found.get("type") == _XGMI:
        return "XGMI"
    return _HOPS.get(found.get("hops", 0), "PHB") if found.get("type") == _PCIE else UNKNOWN


def _accesses(library: Any, row: Sequence[Any], column: Sequence[Any]) -> bool | None:  # noqa: ANN401
    found = Ask(library, row[1])("is_P2P_accessible", column[1])
    return found if isinstance(found, bool) else None


def driver_version(library: Any) -> str | None:  # noqa: ANN401
    """Return the version of the amdgpu driver."""
    for handle in _handles(library)[:1]:
        found = Ask(library, handle)("get_gpu_driver_info") or {}
        return _known(found.get("driver_version"))
    return None


def rocm_version(library: Any) -> str | None:  # noqa: ANN401
    """Return the version of the host's ROCm, or None."""
    try:
        is_found, version = library.amdsmi_get_rocm_version()
    except Exception:  # noqa: BLE001 - it opens one more library, or is missing
        return None
    return str(version) if is_found else None


def _node(value: object) -> int | None:
    """Return a NUMA node; a host without NUMA has the largest 32-bit number."""
    found = _number(value)
    return found if found is not None and 0 <= found < _NO_NODE else None


def _watts(value: object) -> float | None:
    found = _number(value)
    if not found:
        return None
    return found / MICROWATTS if found > MAX_PLAUSIBLE_WATTS else float(found)


def _number(value: object) -> int | None:
    """Return a number; amdsmi writes "N/A" where it has none."""
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_number(value: str, base: int) -> bool:
    try:
        int(value, base)
    except ValueError:
        return False
    return True


def _known(value: object) -> str | None:
    return None if value in (None, "", "N/A") else str(value)
