"""Run one part of a job in a fork, so that its peak memory holds nothing of the parts before.

Measured one after the other in one process, a quantised model seemed to need more memory
than its original: what the first left behind was counted for the second. With CUDA the
allocator's peak is exact and a fork would break the driver, so nothing is forked there.
"""

import dataclasses
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn, TypeVar

import torch

from runners.jobs.events import Emitter
from runners.jobs.loading import pick_device
from runners.jobs.runtime import BadInputError, Job, disk_full

Result = TypeVar("Result")


def run_isolated(job: Job, work: Callable[[Job], Result]) -> Result:
    """Return ``work(job)`` out of a child process; die as the child died.

    Assumes: this process has run no torch operation yet, so no thread pool is lost in the fork.
    """
    if pick_device().type != "cpu":
        return work(job)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run_child, args=(job, work, sender))
    child.start()
    sender.close()
    outcomes = _receive(receiver)
    child.join()
    if not outcomes:
        die_as(child.exitcode)
    outcome: Result | BadInputError = outcomes[0]
    if isinstance(outcome, BadInputError):
        raise outcome
    return outcome


def _run_child(
    job: Job, work: Callable[[Job], Result], sender: "Connection[Result | BadInputError, None]"
) -> None:
    own = dataclasses.replace(job, emitter=Emitter(job.emitter.fd))  # threads are not forked
    # Nor is torch's thread pool: whoever comes first makes it anew, and where two threads of a
    # model's loader come at once, torch 2.13 gives up ("Invalid thread pool", 103 of 150 tries).
    torch.set_num_threads(torch.get_num_threads())
    try:
        sender.send(work(own))
    except BadInputError as error:
        sender.send(error)
    except Exception as error:
        full = disk_full(error, job.attempt_dir)
        if full is None:
            raise
        sender.send(full)
    finally:
        own.emitter.close()


def _receive(
    receiver: "Connection[None, Result | BadInputError]",
) -> list[Result | BadInputError]:
    try:
        return [receiver.recv()]
    except EOFError:  # the child ended without a word
        return []


def die_as(exitcode: int | None) -> NoReturn:
    """End this process by the child's signal or exit code: the supervisor judges that."""
    if exitcode is not None and exitcode < 0:
        if -exitcode not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-exitcode, signal.SIG_DFL)
        os.kill(os.getpid(), -exitcode)
    sys.exit(exitcode or 1)
