"""Why an attempt ended: one code per cause, shared by host and server. Standard library only."""

from enum import StrEnum


class Reason(StrEnum):
    """The closed list of reason codes; every code has words in ``webapp/jobs/reasons.py``."""

    OK = "ok"

    # The workload's fault: the class is ``failed``.
    OOM_GPU = "oom_gpu"
    OOM_HOST = "oom_host"
    NCCL_TIMEOUT = "nccl_timeout"
    RANK_LOST = "rank_lost"
    EXIT_NONZERO = "exit_nonzero"
    SIGNAL = "signal"
    MAX_DURATION = "max_duration"
    MODEL_OR_DATA_MISSING = "model_or_data_missing"
    BAD_INPUT = "bad_input"

    # Ours to answer for: the class is ``error``.
    PREFLIGHT_FAILED = "preflight_failed"
    ENGINE_START_FAILED = "engine_start_failed"
    ENVIRONMENT_FAILED = "environment_failed"
    ENGINE_LOST = "engine_lost"
    START_TIMEOUT = "start_timeout"
    NEVER_STARTED = "never_started"
    SUPERVISOR_LOST = "supervisor_lost"
    HOST_REBOOTED = "host_rebooted"
    DISK_FULL = "disk_full"
    GPU_FAULT = "gpu_fault"
    KILLED_EXTERNALLY = "killed_externally"
    VERSION_INCOMPATIBLE = "version_incompatible"
    INTERNAL = "internal"

    # A person or a rule asked for it: the class is ``stopped``.
    STOPPED_BY_USER = "stopped_by_user"
    STOPPED_BY_OPERATOR = "stopped_by_operator"
    QUOTA = "quota"
    SUPERSEDED = "superseded"
    PEER_ENDED = "peer_ended"
    LOST_AND_ABANDONED_BY_USER = "lost_and_abandoned_by_user"

    # It never had its turn: the class is ``expired``.
    QUEUE_TIMEOUT = "queue_timeout"


FAILED = frozenset(
    {
        Reason.OOM_GPU,
        Reason.OOM_HOST,
        Reason.NCCL_TIMEOUT,
        Reason.RANK_LOST,
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
        Reason.QUOTA,
        Reason.SUPERSEDED,
        Reason.PEER_ENDED,
        Reason.LOST_AND_ABANDONED_BY_USER,
    }
)
ERROR = frozenset(Reason) - FAILED - STOPPED - {Reason.OK, Reason.QUEUE_TIMEOUT}
