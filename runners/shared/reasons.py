"""Reason codes of attempt ends, shared by host and server. Standard library only."""

from enum import StrEnum


class Reason(StrEnum):
    """The reason codes; ``webapp/jobs/reason_words.py`` has a text for each."""

    OK = "ok"

    # Caused by the workload: class ``failed``.
    OOM_GPU = "oom_gpu"
    OOM_HOST = "oom_host"
    NCCL_TIMEOUT = "nccl_timeout"
    NCCL_ERROR = "nccl_error"
    RANK_LOST = "rank_lost"
    KERNEL_FAILED = "kernel_failed"
    EXIT_NONZERO = "exit_nonzero"
    SIGNAL = "signal"
    MAX_DURATION = "max_duration"
    MODEL_OR_DATA_MISSING = "model_or_data_missing"
    BAD_INPUT = "bad_input"

    # Caused by the platform: class ``error``.
    PREFLIGHT_FAILED = "preflight_failed"
    ENGINE_START_FAILED = "engine_start_failed"
    ENVIRONMENT_FAILED = "environment_failed"
    DOWNLOAD_FAILED = "download_failed"
    ENGINE_LOST = "engine_lost"
    START_TIMEOUT = "start_timeout"
    NEVER_STARTED = "never_started"
    SUPERVISOR_LOST = "supervisor_lost"
    HOST_REBOOTED = "host_rebooted"
    DISK_FULL = "disk_full"
    GPU_FAULT = "gpu_fault"
    GPU_DRIVER_MISMATCH = "gpu_driver_mismatch"
    KILLED_EXTERNALLY = "killed_externally"
    VERSION_INCOMPATIBLE = "version_incompatible"
    INTERNAL = "internal"

    # Requested by a person or a rule: class ``stopped``.
    STOPPED_BY_USER = "stopped_by_user"
    STOPPED_BY_OPERATOR = "stopped_by_operator"
    SITE_STOPPED = "site_stopped"
    QUOTA = "quota"  # of the team; a full quota of a disk is DISK_FULL
    SUPERSEDED = "superseded"
    PEER_ENDED = "peer_ended"
    LOST_AND_ABANDONED_BY_USER = "lost_and_abandoned_by_user"

    # Never started: class ``expired``.
    QUEUE_TIMEOUT = "queue_timeout"


FAILED = frozenset(
    {
        Reason.OOM_GPU,
        Reason.OOM_HOST,
        Reason.NCCL_TIMEOUT,
        Reason.NCCL_ERROR,
        Reason.RANK_LOST,
        Reason.KERNEL_FAILED,
        Reason.EXIT_NONZERO,
        Reason.SIGNAL,
        Reason.MAX_DURATION,
        Reason.MODEL_OR_DATA_MISSING,
        Reason.BAD_INPUT,
    }
)
STOPPED = frozenset(
    {
        Reason.STOPPED_BY_USER,
        Reason.STOPPED_BY_OPERATOR,
        Reason.SITE_STOPPED,
        Reason.QUOTA,
        Reason.SUPERSEDED,
        Reason.PEER_ENDED,
        Reason.LOST_AND_ABANDONED_BY_USER,
    }
)
ERROR = frozenset(Reason) - FAILED - STOPPED - {Reason.OK, Reason.QUEUE_TIMEOUT}
