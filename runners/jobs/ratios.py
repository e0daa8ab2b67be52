"""Measures ratios on shared machines: alternating rounds of CPU time, parts in forks."""

import dataclasses
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import NoReturn, TypeVar

import numpy as np
import torch
from scipy import stats

from runners.host.bench import Ratio
from runners.jobs.events import Emitter
from runners.jobs.loading import pick_device
from runners.jobs.runtime import BadInputError, Job, disk_full

LEVEL = 0.95
SECONDS = "processor seconds"
Method = Callable[[], object]


def seconds_in_alternating_rounds(methods: Sequence[Method], rounds: int) -> list[list[float]]:
    """Return the CPU seconds of each method in each round, [methods][rounds], after a warm-up.

    Every other round runs in reverse order, so that no method always has warm caches.
    """
    seconds: list[list[float]] = [[] for _ in methods]
    order = list(range(len(methods)))
    for number in range(rounds + 1):
        for at in order if number % 2 else reversed(order):
            began = time.process_time()
            methods[at]()
            if number:
                seconds[at].append(time.process_time() - began)
    return seconds


def ratio_of(name: str, baseline: Sequence[float], technique: Sequence[float]) -> Ratio:
    """Return the geometric mean of the rounds' ratios with its Student's t interval.

    A single round has no interval.
    """
    logs = np.log(np.asarray(baseline) / np.asarray(technique))
    count, mean = len(logs), float(logs.mean())
    if count == 1:
        return Ratio(name, math.exp(mean), 1e-9, 1e9, 1, SECONDS)
    error = float(logs.std(ddof=1)) / math.sqrt(count)
    reach = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * error
    low, high = math.exp(mean - reach), math.exp(mean + reach)
    return Ratio(name, math.exp(mean), low, high, count, SECONDS)


# Runs one part of a job in a fork, so that its peak memory excludes earlier parts.
#
# When measured in one process, a quantised model seemed to need more memory than its original,
# because leftovers of the first were counted for the second. With CUDA the allocator's peak is
# exact and a fork would break the driver, so nothing is forked there.


Result = TypeVar("Result")


def run_isolated(job: Job, work: Callable[[Job], Result]) -> Result:
    """Return ``work(job)`` from a child process; end as the child if it dies.

    Assumes: this process has not run any torch operation, so the fork loses no thread pool.
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
    # Nor is torch's thread pool: its first user recreates it, and if two threads of a model's
    # loader do so at once, torch 2.13 fails ("Invalid thread pool", 103 of 150 tries).
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
    except EOFError:  # the child ended without a result
        return []


def die_as(exitcode: int | None) -> NoReturn:
    """End this process with the child's signal or exit code, for the supervisor to classify."""
    if exitcode is not None and exitcode < 0:
        if -exitcode not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-exitcode, signal.SIG_DFL)
        os.kill(os.getpid(), -exitcode)
    sys.exit(exitcode or 1)
