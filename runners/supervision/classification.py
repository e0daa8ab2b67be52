"""Classifies the end of an attempt into a reason, from its output and the host's condition."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from runners.shared.log_text import lines_of
from runners.shared.reasons import Reason
from runners.supervision.procfs import PROC, memory_headroom

# Patterns of the errors of GPUs, their drivers and collectives, and the rank of one.
#
# ``tests/runners/test_classification.py`` has a real message of each, with its source. Standard
# library only.


# Memory, NVLink or PCIe of the GPU: the driver's Xid errors that are not the program's, by the
# "XID Errors" catalogue (docs.nvidia.com/deploy/xid-errors), and the runtime's own messages.
FAULT = re.compile(
    r"uncorrectable (ECC|NVLink) error"
    r"|hardware stack error"
    r"|fallen off the bus"
    r"|\bGPU is lost\b"
    r"|\bXid \(PCI:[^)]*\): (46|48|62|63|64|74|79|92|94|95|110|119|120|136|140|143|155|156|158)\b"
    r"|HW Exception by GPU node.*(GPU Hang|RAS|ECC)"
)
# A kernel of the program: a wrong address, an index out of range, a failed assertion.
KERNEL = re.compile(
    r"(CUDA|HIP) error: (an illegal (memory access|instruction)|misaligned address"
    r"|device-side assert|unspecified launch failure|invalid program counter"
    r"|the launch timed out|operation not supported on global/shared address space)"
    r"|Memory access fault by GPU node"
    r"|HSA_STATUS_ERROR_(EXCEPTION|MEMORY_APERTURE_VIOLATION|ILLEGAL_INSTRUCTION)"
    r"|\bXid \(PCI:[^)]*\): (13|31|43|45)\b"
)
# torch also warns of an old driver where it only computes on the CPU: an error, not the warning.
MISMATCH = re.compile(
    r"Driver/library version mismatch"
    r"|Error: The NVIDIA driver on your system is too old"
    r"|CUDA driver version is insufficient for CUDA runtime version"
    r"|no kernel image is available for execution on the device"
    r"|system has unsupported display driver / cuda driver combination"
    r"|system not yet initialized"
)
# torch.distributed's watchdog, which aborts the process, and the frames of its abort.
NCCL_TIMEOUT = re.compile(
    r"NCCL(?! INFO)[^(\n]*\btimeout\b(?!\()"
    r"|Watchdog caught collective"
    r"|Heartbeat monitor timed out"
    r"|ProcessGroupNCCL's watchdog got stuck"
    r"|ProcessGroupNCCL::WorkNCCL::checkTimeout",
    re.IGNORECASE,
)
PEER_LOST = re.compile(r"remote process exited or there was a network error")
NCCL = re.compile(
    r"NCCL [Ee]rror\b.*(unhandled (system|cuda) error|internal error|invalid (argument|usage))"
    r"|Some NCCL operations have failed or timed out"
)
# torchrun's report of the rank that failed first.
ROOT_CAUSE = re.compile(
    r"^Root Cause \(first observed failure\):\n(?:.*\n){1,6}? +exitcode +: (-?\d+) ", re.MULTILINE
)
_RANK = (
    re.compile(
        r"^Root Cause \(first observed failure\):\n(?:.*\n){1,4}? +rank +: (\d+) ", re.MULTILINE
    ),
    re.compile(r"\[Rank (\d+)\] Watchdog caught"),
    re.compile(r"\bRank (\d+)\] (?:Heartbeat|ProcessGroupNCCL)"),
    re.compile(r"^\[rank(\d+)\]:", re.MULTILINE),
)


def rank_of(text: str) -> int | None:
    """Return the rank that reported its failure first, None if the text names none.

    In a timeout it is a rank that waited: the one that did not come has reported nothing.
    """
    found = (pattern.search(text) for pattern in _RANK)
    return next((int(each[1]) for each in found if each), None)


# Patterns of out-of-memory messages, for GPU and host memory. Standard library only.
#
# ``tests/runners/test_classification.py`` has a real message of each library, with its source.


# torch (CUDA, ROCm, XPU, MPS), the CUDA runtime, cuBLAS, llama.cpp, vLLM, JAX.
GPU = re.compile(
    r"(CUDA|HIP|XPU|MPS backend) out of memory"
    r"|torch(\.cuda)?\.OutOfMemoryError"
    r"|CUDA error: out of memory"
    r"|cudaMalloc failed: out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED"
    r"|No available memory for the cache blocks"
    r"|KV cache is needed, which is larger than the available KV cache memory"
    r"|RESOURCE_EXHAUSTED: Out of memory"
)
# torch's CPU allocator, numpy, Python, the C++ and Rust libraries, the kernel.
HOST = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory"
    r"|^(\w+\.)*_?(Array)?MemoryError\b"
    r"|std::bad_alloc"
    r"|memory allocation of \d+ bytes failed"
    r"|Cannot allocate memory",
    re.MULTILINE,
)


# Classifies the end of an attempt into a reason; the first matching rule wins.
#
# Standard library only.


ENVIRONMENT_NOT_BUILT = "ENVIRONMENT_NOT_BUILT"
DOWNLOAD_FAILED = "DOWNLOAD_FAILED"
_TEXTS = (
    # Before its causes: pip may also report a full disk.
    (Reason.ENVIRONMENT_FAILED, re.compile(rf"^{ENVIRONMENT_NOT_BUILT}: ", re.MULTILINE)),
    # Markers that a job process itself writes to stderr.
    (Reason.DOWNLOAD_FAILED, re.compile(rf"^{DOWNLOAD_FAILED}: ", re.MULTILINE)),
    (Reason.MODEL_OR_DATA_MISSING, re.compile(r"^MODEL_OR_DATA_MISSING: ", re.MULTILINE)),
    (Reason.DISK_FULL, re.compile(r"^DISK_FULL: ", re.MULTILINE)),
    (Reason.BAD_INPUT, re.compile(r"^BAD_INPUT: ", re.MULTILINE)),
    (Reason.OOM_GPU, GPU),
    (Reason.OOM_HOST, HOST),
    (Reason.DISK_FULL, re.compile(r"No space left|Disk quota exceeded")),
    (Reason.GPU_FAULT, FAULT),
    (Reason.KERNEL_FAILED, KERNEL),
    (Reason.GPU_DRIVER_MISMATCH, MISMATCH),
    (Reason.NCCL_TIMEOUT, NCCL_TIMEOUT),
    (Reason.ENGINE_LOST, re.compile(r"^ENGINE_LOST: ", re.MULTILINE)),
    # Last: a rank that lost its peers does not report the cause.
    (
        Reason.RANK_LOST,
        re.compile(r"^RANK_LOST: |Rendezvous\w*Error|DistNetworkError", re.MULTILINE),
    ),
    (Reason.RANK_LOST, PEER_LOST),
    (Reason.NCCL_ERROR, NCCL),
)
# What a rank reports whose peer has failed, 10 minutes after the peer.
_CONSEQUENCES = frozenset({Reason.NCCL_TIMEOUT, Reason.RANK_LOST, Reason.NCCL_ERROR})
_SHELL_SIGNAL = 128  # shells report a signal as 128 plus its number
_CRASHES = frozenset({signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV})


class Ending(NamedTuple):
    """The facts about an attempt after its last process has ended."""

    exit_code: int | None  # None: ended by a signal, or never executed
    signal_number: int | None
    last_text: str
    stop_reason: Reason | None = None  # a stop was requested, or the time limit was reached
    is_exec_failure: bool = False
    has_oom_kill: bool = False  # the cgroup's OOM counter rose during the attempt
    # ``last_text`` and what came before it: aborting ranks print kilobytes of frames each.
    longer_text: str = ""


def classify(ending: Ending) -> Reason:
    """Return the reason code of an ending."""
    if ending.stop_reason is not None:
        return ending.stop_reason
    if ending.is_exec_failure:
        return Reason.ENGINE_START_FAILED
    if ending.exit_code == 0:
        return Reason.OK
    number = _signal_of(ending)
    stated_reason = _stated(ending.last_text)
    if stated_reason in _CONSEQUENCES or (stated_reason is None and number == signal.SIGABRT):
        stated_reason = _stated(ending.longer_text) or stated_reason
    if stated_reason in {None, Reason.RANK_LOST} and number == signal.SIGKILL:
        return Reason.OOM_HOST if ending.has_oom_kill else Reason.KILLED_EXTERNALLY
    if stated_reason is not None:
        return stated_reason
    return Reason.EXIT_NONZERO if number is None else Reason.SIGNAL


def _stated(text: str) -> Reason | None:
    return next((reason for reason, pattern in _TEXTS if pattern.search(text)), None)


def _signal_of(ending: Ending) -> int | None:
    """Return the signal that ended the job, or the rank that failed first."""
    if ending.signal_number is not None:
        return ending.signal_number
    code = (ending.exit_code or 0) - _SHELL_SIGNAL
    if code in _CRASHES:
        return code
    root_cause = ROOT_CAUSE.search(ending.last_text)
    return -int(root_cause[1]) if root_cause and int(root_cause[1]) < 0 else None


# Reads the host's condition at an attempt's end: memory, disk, load, temperature, GPU errors.
#
# Standard library only. Unreadable values are left out: a container may hide any of them.


KERNEL_LOG = Path("/dev/kmsg")
THERMAL = Path("/sys/class/thermal")
MAX_XIDS = 8
_RECORD_BYTES = 8192
_MILLI = 1000
_MICRO = 1_000_000
# Such as "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus." (NVIDIA, Xid Errors).
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+), (.*)")


def read(folder: Path, since_monotonic_s: float) -> dict[str, Any]:
    """Return the present conditions and the Xid errors since an instant of this boot."""
    values: dict[str, Any] = {
        **_memory(PROC / "meminfo"),
        "load": os.getloadavg()[0],
        "temperature_celsius": _hottest(THERMAL),
        "xids": list(xids(KERNEL_LOG, since_monotonic_s))[-MAX_XIDS:],
    }
    with suppress(OSError):
        disk = os.statvfs(folder)
        values["disk_free_bytes"] = disk.f_bavail * disk.f_frsize
    if (room := memory_headroom()) is not None:
        values["group_memory_available_bytes"] = room
    return {name: value for name, value in values.items() if value is not None}


def _memory(meminfo: Path) -> dict[str, int]:
    names = {"MemAvailable": "memory_available_bytes", "SwapFree": "swap_free_bytes"}
    values = {}
    with suppress(OSError, ValueError):
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in names:
                values[names[name]] = int(rest.split()[0]) * 1024
    return values


def _hottest(thermal: Path) -> float | None:
    """Return the highest temperature of the machine's sensors, in degrees Celsius."""
    degrees = []
    for zone in thermal.glob("thermal_zone*/temp"):
        with suppress(OSError, ValueError):
            degrees.append(int(zone.read_text()) / _MILLI)
    return max(degrees, default=None)


def xids(log: Path, since_monotonic_s: float) -> Iterator[str]:
    """Yield the GPU driver's Xid errors since an instant, if the kernel log is readable."""
    for record in _records(log):
        head, _, text = record.partition(";")
        at = head.split(",")[2:3]  # level, number, microseconds since boot
        match = _XID.search(text)
        if match and at and int(at[0]) / _MICRO >= since_monotonic_s:
            yield f"Xid {match[2]} on {match[1]}: {match[3][:120]}"


def _records(log: Path) -> Iterator[str]:
    try:
        handle = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        while True:
            try:
                data = os.read(handle, _RECORD_BYTES)
            except BrokenPipeError:  # this record was overwritten: read the next one
                continue
            except OSError:
                return
            if not data:
                return
            yield from lines_of(data)
    finally:
        os.close(handle)
