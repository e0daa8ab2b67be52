"""How an attempt ended, in words: its exit code or signal, and how the host was then."""

import signal
from collections.abc import Iterator, Mapping
from typing import Any

from webapp.core.units import clock, memory, number

CODES = {
    1: "an error that the program did not handle",
    2: "it was called in a way that it does not know",
    3: "it could not run as asked",
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
    "SIGPIPE": "nobody read what it wrote any more",
    "SIGSEGV": "it touched memory that is not its own",
    "SIGTERM": "it was asked to end",
    "SIGXCPU": "its processor time was used up",
}
_SHELL_SIGNAL = 128  # a shell reports a signal as this and the signal's number


def ending_words(record: Mapping[str, Any]) -> str:
    """Return the exit code or signal of an exit record in a sentence."""
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
    """Return how long a job ran against the longest that it was allowed."""
    allowed = clock(limit_seconds) if limit_seconds else "its limit"
    return f"It ran {clock(seconds)}; {allowed} was the longest that it was allowed."


Row = tuple[str, str]  # what, and how it was


def host_rows(record: Mapping[str, Any]) -> list[Row]:
    """Return how the host was when the attempt ended, as far as it could tell."""
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
    for at, load in enumerate(loads):
        parts = [f"{memory(load.get('memory_used_bytes') or 0)} held"]
        if load.get("temperature_celsius") is not None:
            parts.append(f"{number(load['temperature_celsius'])} °C")
        if load.get("foreign_pids"):
            parts.append(f"also used by {', '.join(map(str, load['foreign_pids']))}")
        yield f"GPU {at}", " · ".join(parts)


def _reports(conditions: Mapping[str, Any]) -> Iterator[Row]:
    for text in conditions.get("xids") or ():
        yield "Driver reported", str(text)
