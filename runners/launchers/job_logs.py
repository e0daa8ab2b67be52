"""The output of jobs that somebody else started: its last lines, and what well-known ones say.

Sources of the lines that are read, each opened for what stands here:

- Megatron-LM: ``training_log`` in ``megatron/training/training.py`` ("elapsed time per iteration
  (ms)", "lm loss", "throughput per GPU (TFLOP/s/GPU)").
- torchtitan: ``MetricsProcessor.log`` in ``torchtitan/components/metrics.py``; its tps is of one
  device.
- Transformers' Trainer prints a dictionary with ``loss`` and ``grad_norm``; without a time.
- Servers on uvicorn (vLLM, SGLang, TGI's routers in Python) print "Uvicorn running on".
"""

import os
import re
import stat
from collections.abc import Iterable, Sequence

from runners.shared.log_text import lines_of, shortened
from runners.shared.observed import LINE_CHARACTERS, MOST_ADDRESSES, MOST_LINES

TAIL_BYTES = 64 * 1024
_NUMBER = r"([-+]?[0-9][0-9.,]*(?:[eE][-+]?[0-9]+)?)"
_MEGATRON = re.compile(r"\biteration +[0-9]+/ *[0-9]+ \|")
_TITAN = re.compile(r"(?<!validate )\bstep: +[0-9]+ +loss: ")
_TRAINER = re.compile(r"^\{'loss': ")
# Of each kind of line: a figure's name, how it is written, and how many base units one of it is.
_READ = (
    (_MEGATRON, (
        ("step", re.compile(r"\biteration +([0-9]+)/"), 1.0),
        ("total_steps", re.compile(r"\biteration +[0-9]+/ *([0-9]+)"), 1.0),
        ("step_seconds", re.compile(rf"elapsed time per iteration \(ms\): *{_NUMBER}"), 1e-3),
        ("loss", re.compile(rf"\blm loss: *{_NUMBER}"), 1.0),
        ("device_flops_per_second", re.compile(rf"per GPU \(TFLOP/s/GPU\): *{_NUMBER}"), 1e12),
    )),
    (_TITAN, (
        ("step", re.compile(r"\bstep: +([0-9]+)"), 1.0),
        ("loss", re.compile(rf"\bloss: *{_NUMBER}"), 1.0),
        ("device_tokens_per_second", re.compile(rf"\btps: *{_NUMBER}"), 1.0),
        ("device_flops_per_second", re.compile(rf"\btflops: *{_NUMBER}"), 1e12),
    )),
    (_TRAINER, (("loss", re.compile(rf"'loss': '?{_NUMBER}"), 1.0),)),
)  # fmt: skip
_SERVES = re.compile(r"(?:Uvicorn running on|API server(?: [0-9]+)? on) (https?)://\S+?:([0-9]+)")


def figures_of(lines: Iterable[str]) -> dict[str, float]:
    """Return the figures of the last line of each kind that says any, in base units.

    >>> figures_of(["step: 10  loss:  7.1  memory: 1.5GiB(2.00%)  tps: 1,234  mfu: 9.1%"])
    {'step': 10.0, 'loss': 7.1, 'device_tokens_per_second': 1234.0}
    """
    found: dict[str, float] = {}
    for line in lines:
        for kind, fields in _READ:
            if kind.search(line):
                told = ((name, field.search(line), unit) for name, field, unit in fields)
                found |= {name: _value(at[1]) * unit for name, at, unit in told if at}
    return found


def _value(text: str) -> float:
    """Return a number that may have commas between its thousands, 0 if it is none."""
    try:
        return float(text.replace(",", "").rstrip("."))
    except ValueError:
        return 0.0


def addresses_of(lines: Iterable[str], machine: str) -> tuple[str, ...]:
    """Return the addresses at which a job says that it serves, on the machine that it runs on.

    What it binds to (0.0.0.0, loopback) says nothing about how others reach it.

    >>> addresses_of(["INFO: Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C)"], "n1")
    ('http://n1:8000',)
    """
    said = [_SERVES.search(line) for line in lines] if machine else []
    named = f"[{machine}]" if ":" in machine else machine
    urls = dict.fromkeys(f"{each[1]}://{named}:{int(each[2])}" for each in said if each)
    return tuple(urls)[-MOST_ADDRESSES:]


def last_lines(output: str | bytes) -> tuple[str, ...]:
    """Return the last lines of an output as they are reported."""
    return tuple(shortened(each, LINE_CHARACTERS - 40) for each in lines_of(output)[-MOST_LINES:])


class LogUnreadableError(Exception):
    """A job's output cannot be read here; the message says why."""


def read_tail(path: str, user_id: int | None) -> Sequence[str]:
    """Return the last lines of a job's output that lies on this machine or a shared file system.

    The job's user named the path and not the agent's: only a plain file is read that is that
    user's own, so that nobody has the agent show what only the agent may read.

    Raises:
        LogUnreadableError: there is no such file for this agent.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        number = os.open(path, flags)
    except (OSError, ValueError) as error:
        words = (
            os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "no path"
        )
        raise LogUnreadableError(
            f"{path}: {words}; the agent reads it if it lies on a file system that this host "
            "shares and its user may read it"
        ) from None
    try:
        about = os.fstat(number)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != user_id:
            raise LogUnreadableError(f"{path} is no plain file of the job's user")
        output = os.pread(number, TAIL_BYTES, max(0, about.st_size - TAIL_BYTES))
    finally:
        os.close(number)
    return last_lines(output)
