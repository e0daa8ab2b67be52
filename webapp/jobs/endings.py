"""Text for an attempt's end: exit code or signal, and the host's condition at that time."""

import signal
from collections.abc import Iterator, Mapping
from typing import Any

from webapp.core.units import clock, memory, number

CODES = {
    1: "an error that the program did not handle",
    2: "its command line was not valid",
    3: "it could not run with this specification",
    126: "the file is no program that may be executed",
    127: "the program was not found",
}
SIGNALS = {
    "SIGABRT": "it gave up by itself, as after a failed check",
    "SIGBUS": "it touched memory that is not there, as when a disk is full under a mapped file",
    "SIGFPE": "it divided by nought or overflowed",
    "SIGILL": "it used an instruction that this processor does not have",
    "SIGINT": "somebody interrupted it",
    "SIGKILL": "the system or a person killed it; a program cannot do so by itself",
    "SIGPIPE": "the reader of its output closed the pipe",
    "SIGSEGV": "it touched memory that is not its own",
    "SIGTERM": "it received a request to stop",
    "SIGXCPU": "its processor time was used up",
}
_SHELL_SIGNAL = 128  # shells report a signal as 128 plus its number


def ending_words(record: Mapping[str, Any]) -> str:
    """Return the exit code or signal of an exit record, and the rank, in sentences."""
    rank = record.get("rank")
    reported = "" if rank is None else f" Rank {rank} reported its failure first."
    return f"{_exit_words(record)}{reported}"


def _exit_words(record: Mapping[str, Any]) -> str:
    code, number_ = record.get("exit_code"), record.get("signal")
    if number_:
        return f"Ended by {_signal(int(number_))}."
    if code is None:
        return "No exit code: the process never reported one."
    if code > _SHELL_SIGNAL and _name(code - _SHELL_SIGNAL):
        return f"Exit code {code}: a child was ended by {_signal(code - _SHELL_SIGNAL)}."
    meaning = CODES.get(code)
    return f"Exit code {code}: {meaning}." if meaning else f"Exit code {code}, of its own meaning."


def _signal(value: int) -> str:
    name = _name(value)
    meaning = SIGNALS.get(name)
    named = f"signal {value} ({name})" if name else f"signal {value}"
    return f"{named}: {meaning}" if meaning else named


def _name(value: int) -> str:
    try:
        return signal.Signals(value).name
    except ValueError:
        return ""


def limit_words(seconds: float, limit_seconds: float | None) -> str:
    """Return a job's duration relative to its limit as a sentence."""
    allowed = clock(limit_seconds) if limit_seconds else "its limit"
    return f"It ran {clock(seconds)}; {allowed} was the longest that it was allowed."


Row = tuple[str, str]  # label, value


def host_rows(record: Mapping[str, Any]) -> list[Row]:
    """Return the host's condition when the attempt ended, as far as it was recorded."""
    conditions = record.get("conditions") or {}
    return [*_machine(conditions), *_gpus(record.get("gpus") or ()), *_reports(conditions)]


def _machine(conditions: Mapping[str, Any]) -> Iterator[Row]:
    sizes = (
        ("memory_available_bytes", "Memory free"),
        ("group_memory_available_bytes", "Left to its control group"),
        ("swap_free_bytes", "Swap free"),
        ("disk_free_bytes", "Disk free"),
    )
    for name, label in sizes:
        if conditions.get(name) is not None:
            yield label, str(memory(conditions[name]))
    if conditions.get("load") is not None:
        yield "Load", f"{number(conditions['load'])} processes"
    if conditions.get("temperature_celsius") is not None:
        yield "Hottest sensor", f"{number(conditions['temperature_celsius'])} °C"


def _gpus(loads: Iterator[Any] | tuple[Any, ...]) -> Iterator[Row]:
    for index, load in enumerate(loads):
        parts = [f"{memory(load.get('memory_used_bytes') or 0)} held"]
        if load.get("temperature_celsius") is not None:
            parts.append(f"{number(load['temperature_celsius'])} °C")
        if load.get("foreign_pids"):
            parts.append(f"also used by {', '.join(map(str, load['foreign_pids']))}")
        yield f"GPU {index}", " · ".join(parts)


def _reports(conditions: Mapping[str, Any]) -> Iterator[Row]:
    for text in conditions.get("xids") or ():
        yield "Driver reported", str(text)
