"""Classifies the end of an attempt into a reason; the first matching rule wins.

Standard library only.
"""

import re
import signal
from typing import NamedTuple

from runners.reasons import Reason
from runners.supervision import oom

ENVIRONMENT_NOT_BUILT = "ENVIRONMENT_NOT_BUILT"
_TEXTS = (
    # Before its causes: pip may also report a full disk.
    (Reason.ENVIRONMENT_FAILED, re.compile(rf"^{ENVIRONMENT_NOT_BUILT}: ", re.MULTILINE)),
    # Markers that a job process itself writes to stderr.
    (Reason.MODEL_OR_DATA_MISSING, re.compile(r"^MODEL_OR_DATA_MISSING: ", re.MULTILINE)),
    (Reason.DISK_FULL, re.compile(r"^DISK_FULL: ", re.MULTILINE)),
    (Reason.BAD_INPUT, re.compile(r"^BAD_INPUT: ", re.MULTILINE)),
    (Reason.OOM_GPU, oom.GPU),
    (Reason.OOM_HOST, oom.HOST),
    (Reason.NCCL_TIMEOUT, re.compile(r"NCCL.*timeout|Watchdog caught collective", re.IGNORECASE)),
    (Reason.DISK_FULL, re.compile(r"No space left")),
    (Reason.GPU_FAULT, re.compile(r"CUDA error: .*(ECC|Xid|unspecified launch)")),
    (Reason.ENGINE_LOST, re.compile(r"^ENGINE_LOST: ", re.MULTILINE)),
    # Last: a rank that lost its peers does not report the cause.
    (
        Reason.RANK_LOST,
        re.compile(r"^RANK_LOST: |Rendezvous\w*Error|DistNetworkError", re.MULTILINE),
    ),
)
# torchrun's report of a killed rank, which caused the other ranks' errors.
_KILLED_RANK = re.compile(
    r"^Root Cause \(first observed failure\):\n(?:.*\n){1,6}? +exitcode +: -9 ", re.MULTILINE
)


class Ending(NamedTuple):
    """The facts about an attempt after its last process has ended."""

    exit_code: int | None  # None: ended by a signal, or never executed
    signal_number: int | None
    last_text: str
    stop_reason: Reason | None = None  # a stop was requested, or the time limit was reached
    is_exec_failure: bool = False
    has_oom_kill: bool = False  # the cgroup's OOM counter rose during the attempt


def classify(ending: Ending) -> Reason:
    """Return the reason code of an ending."""
    if ending.stop_reason is not None:
        return ending.stop_reason
    if ending.is_exec_failure:
        return Reason.ENGINE_START_FAILED
    if ending.exit_code == 0:
        return Reason.OK
    stated_reason = next(
        (reason for reason, text in _TEXTS if text.search(ending.last_text)), None
    )
    if stated_reason in {None, Reason.RANK_LOST} and _KILLED_RANK.search(ending.last_text):
        return _from_kill(ending)
    return stated_reason or _from_status(ending)


def _from_kill(ending: Ending) -> Reason:
    return Reason.OOM_HOST if ending.has_oom_kill else Reason.KILLED_EXTERNALLY


def _from_status(ending: Ending) -> Reason:
    if ending.signal_number == signal.SIGKILL:
        return _from_kill(ending)
    if ending.signal_number is not None:
        return Reason.SIGNAL
    return Reason.EXIT_NONZERO
