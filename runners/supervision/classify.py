"""Why an attempt ended, from what its supervisor saw; the first rule that matches wins.

Standard library only.
"""

import re
import signal
from typing import NamedTuple

from runners.reasons import Reason
from runners.supervision import oom

ENVIRONMENT_NOT_BUILT = "ENVIRONMENT_NOT_BUILT"
_TEXTS = (
    # Before anything of its cause: pip may say that the disk is full.
    (Reason.ENVIRONMENT_FAILED, re.compile(rf"^{ENVIRONMENT_NOT_BUILT}: ", re.MULTILINE)),
    # What a job process writes to stderr itself when it lacks its input.
    (Reason.MODEL_OR_DATA_MISSING, re.compile(r"^MODEL_OR_DATA_MISSING: ", re.MULTILINE)),
    (Reason.DISK_FULL, re.compile(r"^DISK_FULL: ", re.MULTILINE)),
    (Reason.BAD_INPUT, re.compile(r"^BAD_INPUT: ", re.MULTILINE)),
    (Reason.OOM_GPU, oom.GPU),
    (Reason.OOM_HOST, oom.HOST),
    (Reason.NCCL_TIMEOUT, re.compile(r"NCCL.*timeout|Watchdog caught collective", re.IGNORECASE)),
    (Reason.DISK_FULL, re.compile(r"No space left")),
    (Reason.GPU_FAULT, re.compile(r"CUDA error: .*(ECC|Xid|unspecified launch)")),
    (Reason.ENGINE_LOST, re.compile(r"^ENGINE_LOST: ", re.MULTILINE)),
    # Last: a rank that lost the others says nothing of why they went.
    (
        Reason.RANK_LOST,
        re.compile(r"^RANK_LOST: |Rendezvous\w*Error|DistNetworkError", re.MULTILINE),
    ),
)
# torchrun's report of a rank that was killed; the others only lost it.
_KILLED_RANK = re.compile(
    r"^Root Cause \(first observed failure\):\n(?:.*\n){1,6}? +exitcode +: -9 ", re.MULTILINE
)


class Ending(NamedTuple):
    """What is known when the last process of an attempt is gone."""

    exit_code: int | None  # None: ended by a signal, or never executed
    signal_number: int | None
    last_text: str
    stop_reason: Reason | None = None  # a stop was asked for, or the time was up
    is_exec_failure: bool = False
    has_oom_kill: bool = False  # the control group's counter rose meanwhile


def classify(ending: Ending) -> Reason:
    """Return the reason code of an ending."""
    if ending.stop_reason is not None:
        return ending.stop_reason
    if ending.is_exec_failure:
        return Reason.ENGINE_START_FAILED
    if ending.exit_code == 0:
        return Reason.OK
    told = next((reason for reason, text in _TEXTS if text.search(ending.last_text)), None)
    if told in {None, Reason.RANK_LOST} and _KILLED_RANK.search(ending.last_text):
        return _from_kill(ending)
    return told or _from_status(ending)


def _from_kill(ending: Ending) -> Reason:
    return Reason.OOM_HOST if ending.has_oom_kill else Reason.KILLED_EXTERNALLY


def _from_status(ending: Ending) -> Reason:
    if ending.signal_number == signal.SIGKILL:
        return _from_kill(ending)
    if ending.signal_number is not None:
        return Reason.SIGNAL
    return Reason.EXIT_NONZERO
