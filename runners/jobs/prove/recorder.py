"""A stage of a validation, and the record of what it measured."""

import argparse
import contextlib
import importlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TextIO

import torch

from runners.jobs.runtime import prepare_process
from runners.jobspec.compress import STAGES
from runners.prove.report import HARDWARE, Check, Figure, Missing, PlannerQuery

# ---------------------------------------------------------------------------
# Writes a stage's records as JSON lines, each as soon as it is known.
# ---------------------------------------------------------------------------


Cause = Literal["device", "library", "time"]
MAX_TEXT = 1500
OUT_OF_MEMORY = "Close what else uses the device, or accept that this size does not fit on it."


class Recorder:
    """The records of one stage, on one device, within a time limit.

    ``small`` scales every workload down to the least that runs the path.
    """

    def __init__(
        self, out: TextIO, device: torch.device, seconds: float, *, is_small: bool
    ) -> None:
        self.device = device
        self.is_small = is_small
        self._out = out
        self._deadline = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the stage's time limit."""
        return self._deadline - time.monotonic()

    def figure(
        self,
        name: str,
        unit: str,
        samples: Sequence[float],
        how: str = "",
        question: PlannerQuery | None = None,
    ) -> float:
        """Record a figure as the median of its samples, and return it."""
        value = statistics.median(samples)
        self._write(
            Figure(
                name=name,
                unit=unit,
                value=value,
                samples=tuple(samples),
                device=str(self.device),
                how=how,
                question=question,
            )
        )
        return value

    def check(
        self, name: str, *, is_met: bool, expected: str, found: str, advice: str = ""
    ) -> None:
        """Record a property that holds or not."""
        self._write(
            Check(
                name=name,
                is_met=is_met,
                expected=expected[:MAX_TEXT],
                found=found[:MAX_TEXT],
                advice=advice,
            )
        )

    def missing(self, name: str, why: str, advice: str = "", cause: Cause = "device") -> None:
        """Record something that cannot be tested here."""
        self._write(Missing(name=name, cause=cause, why=why[:MAX_TEXT], advice=advice))

    @contextlib.contextmanager
    def part(self, name: str, *, advice: str = "") -> Iterator[None]:
        """Run one part: whatever it raises is recorded, and the next part runs.

        An absent library is recorded as missing, and any other error as a failed check.
        """
        try:
            yield
        except ImportError as error:
            self._without(name, error)
        except torch.OutOfMemoryError as error:
            self.check(
                name,
                is_met=False,
                expected="to fit into the device's memory",
                found=str(error),
                advice=OUT_OF_MEMORY,
            )
        except Exception as error:  # noqa: BLE001 - each part stands alone
            if isinstance(error.__cause__, ImportError):
                self._without(name, error.__cause__)
                return
            self.check(
                name,
                is_met=False,
                expected="to run without an error",
                found=f"{type(error).__name__}: {error}",
                advice=advice,
            )

    def _without(self, name: str, error: ImportError) -> None:
        package = (error.name or str(error)).partition(".")[0]
        self.missing(name, f"{package} is missing: {error}", f"pip install {package}", "library")

    def has_time(self, name: str, seconds: float) -> bool:
        """Return whether ``seconds`` are left; otherwise record the part as missing."""
        if self.seconds_left >= seconds:
            return True
        self.missing(
            name,
            f"{max(0.0, self.seconds_left):.0f} s of the stage's time were left, "
            f"and this needs about {seconds:.0f} s",
            "Give --minutes more, or only this stage with --stages.",
            "time",
        )
        return False

    def _write(self, record: Figure | Check | Missing) -> None:
        self._out.write(record.model_dump_json() + "\n")
        self._out.flush()


def records_only_on_stdout() -> TextIO:
    """Return stdout for records; what libraries and child processes print goes to stderr."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out


# ---------------------------------------------------------------------------
# Runs one stage and prints its records: ``python -m runners.jobs.prove.recorder STAGE FOLDER``.
# ---------------------------------------------------------------------------


CPU_INFO = Path("/proc/cpuinfo")
KERNEL_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def main(arguments: list[str] | None = None) -> None:
    """Run the stage in argv."""
    parser = argparse.ArgumentParser(prog="python -m runners.jobs.prove.recorder")
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
