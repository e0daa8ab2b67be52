"""How an attempt ended in words: a sentence and the next step for each reason."""

from collections.abc import Mapping
from typing import NamedTuple

from runners.shared.reasons import Reason


class Words(NamedTuple):
    """The sentence and the next step of a reason."""

    sentence: str
    next_step: str


WORDS: Mapping[Reason, Words] = {
    Reason.OK: Words("The job succeeded.", "See its figures, or plan the next job."),
    Reason.OOM_GPU: Words(
        "The GPU ran out of memory.",
        "Plan again with a smaller batch, a narrower weight dtype or more devices.",
    ),
    Reason.OOM_HOST: Words(
        "The host ran out of main memory and the system ended the job.",
        "Plan again with a smaller batch or a narrower weight dtype, or free memory on the host.",
    ),
    Reason.NCCL_TIMEOUT: Words(
        "A rank waited for the others until NCCL's timeout, and the job was aborted.",
        "The rank without a report is the one that hung: see its log, check the links between the "
        "devices on the host's page, then clone the job.",
    ),
    Reason.NCCL_ERROR: Words(
        "NCCL, the library by which the ranks talk, reported an error.",
        "Set NCCL_DEBUG=INFO for the host's agent and clone the job: its log then names the "
        "interface, the device or the shared memory that failed.",
    ),
    Reason.RANK_LOST: Words(
        "A part of the job lost its connection to the others.",
        "See in the logs of each host which one stopped answering, check the network between "
        "them, then clone the job.",
    ),
    Reason.KERNEL_FAILED: Words(
        "A kernel on the GPU failed: a wrong address, an index out of range or an assertion.",
        "Set CUDA_LAUNCH_BLOCKING=1 for the host's agent to see the operator, check that token "
        "ids and labels are below their number of classes, then clone the job. On one GPU "
        "alone, cordon it.",
    ),
    Reason.EXIT_NONZERO: Words(
        "The job's program reported a failure.",
        "Read the last lines of its log; they name the cause.",
    ),
    Reason.SIGNAL: Words(
        "The job's program crashed.",
        "Read the last lines of its log, then clone the job to see if it happens again.",
    ),
    Reason.MAX_DURATION: Words(
        "The job reached the longest duration that it was allowed.",
        "Clone it with fewer steps or a longer limit.",
    ),
    Reason.MODEL_OR_DATA_MISSING: Words(
        "The model or the data was not found on the host.",
        "Check that the folder is there and is below one of the host's model folders.",
    ),
    Reason.BAD_INPUT: Words(
        "The job cannot run with the model, the data or the choices that it was given.",
        "The last line of its log names it and the remedy; then plan or clone it again.",
    ),
    Reason.PREFLIGHT_FAILED: Words(
        "The host did not meet what the job needs.",
        "The events list the failed checks; free the missing resource or choose another host.",
    ),
    Reason.ENGINE_START_FAILED: Words(
        "The engine did not start.",
        "Read the log for the missing piece, install it on the host and clone the job.",
    ),
    Reason.ENGINE_LOST: Words(
        "The engine behind the endpoint crashed repeatedly.",
        "The last lines of its log say how it ended; plan with fewer requests at once, or with "
        "another engine.",
    ),
    Reason.ENVIRONMENT_FAILED: Words(
        "The environment that the job runs in could not be built on the host.",
        "The last lines of its log name the cause; correct it, then build the environment on the "
        "host's page.",
    ),
    Reason.DOWNLOAD_FAILED: Words(
        "The model could not be downloaded to the host.",
        "The last line of its log names the cause. What arrived is kept: a clone of the job goes "
        "on from there.",
    ),
    Reason.START_TIMEOUT: Words(
        "The host did not claim the job within two minutes.",
        "See on the host's page whether its agent runs, then clone the job.",
    ),
    Reason.NEVER_STARTED: Words(
        "The host claimed the job but never started its process.",
        "See the problems on the host's page, then clone the job.",
    ),
    Reason.SUPERVISOR_LOST: Words(
        "The process that watched the job on the host is gone, and its end was not seen.",
        "See the host's own logs, then clone the job.",
    ),
    Reason.HOST_REBOOTED: Words(
        "The host restarted while the job ran.",
        "Clone the job with retries: after the next restart it resumes from its last checkpoint.",
    ),
    Reason.DISK_FULL: Words(
        "The host's disk, or the quota of the agent's account on it, is full.",
        "Free disk space on the host or have the quota raised, then clone the job.",
    ),
    Reason.GPU_FAULT: Words(
        "A GPU reported a hardware fault.",
        "Cordon the GPU and check the driver's log before you try again.",
    ),
    Reason.GPU_DRIVER_MISMATCH: Words(
        "The GPU, its driver and the libraries of the job are incompatible with each other.",
        "Restart the host if its driver was just updated; otherwise install the driver that "
        "torch's CUDA version needs, or a torch that was built for this GPU.",
    ),
    Reason.KILLED_EXTERNALLY: Words(
        "Something outside this product ended the job.",
        "Ask who else works on the host, then clone the job.",
    ),
    Reason.VERSION_INCOMPATIBLE: Words(
        "The host's agent has a version that this server does not work with.",
        "Install the server's version on the host and start its agent again.",
    ),
    Reason.INTERNAL: Words(
        "The product itself failed here.",
        "Read the log, report what you find, and clone the job.",
    ),
    Reason.STOPPED_BY_USER: Words("Its owner stopped the job.", "Clone it to run it again."),
    Reason.STOPPED_BY_OPERATOR: Words(
        "An operator stopped the job.", "Ask the operator of the host before you clone it."
    ),
    Reason.SITE_STOPPED: Words(
        "It was ended because Slipway was stopped on the machine that ran it.",
        "`manage.py up` was stopped there, which ends the jobs of its own machine. Clone the job "
        "to run it again.",
    ),
    Reason.QUOTA: Words(
        "The team's quota was used up.", "Wait for the next period or ask an admin for more."
    ),
    Reason.SUPERSEDED: Words("A newer attempt replaced this attempt.", "See the newer attempt."),
    Reason.PEER_ENDED: Words(
        "It was stopped because the part of the job on another host had ended.",
        "See the host that the job's reason names.",
    ),
    Reason.LOST_AND_ABANDONED_BY_USER: Words(
        "The host was unreachable and a person gave the job up.",
        "When the host is back, it stops the remaining processes. Clone the job to run it again.",
    ),
    Reason.QUEUE_TIMEOUT: Words(
        "The job waited in the queue longer than allowed.",
        "Choose a host with a shorter queue, or clone the job.",
    ),
}


def words_for(reason: str) -> Words:
    """Return the sentence and next step of a reason code."""
    return WORDS[Reason(reason)]
