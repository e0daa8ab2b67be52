"""Classifies the end of an attempt into a reason; the first matching rule wins.

Standard library only.
"""

import re
import signal
from typing import NamedTuple

from runners.reasons import Reason
from runners.supervision import gpu_errors, oom

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
    (Reason.DISK_FULL, re.compile(r"No space left")),
    (Reason.GPU_FAULT, gpu_errors.FAULT),
    (Reason.KERNEL_FAILED, gpu_errors.KERNEL),
    (Reason.GPU_DRIVER_MISMATCH, gpu_errors.MISMATCH),
    (Reason.NCCL_TIMEOUT, gpu_errors.NCCL_TIMEOUT),
    (Reason.ENGINE_LOST, re.compile(r"^ENGINE_LOST: ", re.MULTILINE)),
    # Last: a rank that lost its peers does not report the cause.
    (
        Reason.RANK_LOST,
        re.compile(r"^RANK_LOST: |Rendezvous\w*Error|DistNetworkError", re.MULTILINE),
    ),
    (Reason.RANK_LOST, gpu_errors.PEER_LOST),
    (Reason.NCCL_ERROR, gpu_errors.NCCL),
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
        return _from_kill(ending)
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
    root_cause = gpu_errors.ROOT_CAUSE.search(ending.last_text)
    return -int(root_cause[1]) if root_cause and int(root_cause[1]) < 0 else None


def _from_kill(ending: Ending) -> Reason:
    return Reason.OOM_HOST if ending.has_oom_kill else Reason.KILLED_EXTERNALLY
