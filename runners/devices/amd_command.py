"""What ``amd-smi`` or ``rocm-smi`` prints as JSON, in the form of the library amdsmi.

For hosts whose ROCm has a command and whose environment has no amdsmi; before ROCm 6 that is
rocm-smi. Links between GPUs and processes are not in these answers.
"""

from typing import Any

from runners.devices.commands import CommandUnavailableError, read_json

STATIC = ("amd-smi", "static", "--json")
METRIC = ("amd-smi", "metric", "--json")
ROCM_SMI = (
    "rocm-smi", "--showproductname", "--showuniqueid", "--showbus", "--showmeminfo", "vram",
    "--showmaxpower", "--showpower", "--showuse", "--showtemp", "--showdriverversion", "--json",
)  # fmt: skip


MEBIBYTE = 2**20


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
            raise MissingValueError(f"amd-smi prints no {name}")
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
    return None if found is None else found / MEBIBYTE


def _value(entry: object) -> object:
    """Return a value that the command prints alone or with its unit."""
    return entry.get("value") if isinstance(entry, dict) else entry
