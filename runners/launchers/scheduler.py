"""Launches attempts through a scheduler that owns the machines: Slurm, Kubernetes, Ray.

The supervisor is the scheduler's job, on a node that shares our folder. The folder remains the
record of the attempt; the scheduler is only queried whether the job still exists, and an
unreachable one changes no state. The job's name contains the attempt's id, so an agent killed
between submitting and storing the job's id finds the job and does not resubmit it.
"""

import logging
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from runners.jobspec import JobSpec, TrainSpec
from runners.jobspec.base import SCHEDULER_OPTIONS, SchedulerKind
from runners.launchers import agent_end
from runners.launchers.attempts import LOST_REASONS, AttemptFolder, Verdict
from runners.launchers.launch import LaunchRefusedError, UnrecordedEnd
from runners.shared.messages import RunRequest
from runners.shared.reasons import Reason
from runners.shared.timing import (
    SCHEDULER_END_MARGIN_SECONDS,
    SCHEDULER_KILL_MARGIN_SECONDS,
    SCHEDULER_SETTLE_SECONDS,
    STOP_GRACE_SECONDS,
    scale_duration,
)
from runners.supervision import child

POLL_SECONDS = scale_duration(10.0, least=0.5)
AWAY_SECONDS = scale_duration(30.0, least=0.5)
LEAST_LIMIT_MINUTES = 2
PREFIX = "slipway-"  # of our jobs' names

log = logging.getLogger(__name__)


T = TypeVar("T")


class SchedulerError(Exception):
    """The scheduler rejected a request; the text is its message."""


class SchedulerUnreachableError(SchedulerError):
    """The scheduler does not answer: the state of its jobs is unknown."""


def read_or_note(unread: list[str], what: str, read: Callable[[], T]) -> T | None:
    """Return what the scheduler says; note what it does not say here, and why."""
    try:
        return read()
    except SchedulerUnreachableError:
        unread.append(f"{what}: the scheduler did not answer")
    except SchedulerError as error:
        unread.append(f"{what}: {error}")
    return None


class Phase(StrEnum):
    """The phase of a job, independent of the scheduler's names of states."""

    WAITING = "waiting"
    ACTIVE = "active"
    ENDED = "ended"


class ScheduledJob(Protocol):
    """One job as its scheduler reports it."""

    @property
    def job_id(self) -> str:
        """Return the scheduler's id of the job."""

    @property
    def name(self) -> str:
        """Return the name that we gave it."""

    @property
    def state(self) -> str:
        """Return the scheduler's name of its state."""

    @property
    def detail(self) -> str:
        """Return why it waits, if it does."""

    @property
    def nodes(self) -> str:
        """Return where it runs."""

    @property
    def phase(self) -> Phase:
        """Return its phase."""

    @property
    def end_words(self) -> str:
        """Return what the scheduler says of why it ends or ended, beyond its state, or ""."""


class SchedulerConfig(Protocol):
    """The settings of a host's jobs in its scheduler."""

    @property
    def time_limit_minutes(self) -> int:
        """Return the longest time of a job."""

    @property
    def gpus_per_node(self) -> int:
        """Return how many GPUs a job gets of each node; 0: none is requested."""


class SchedulerLauncher(ABC):
    """Submits attempts to a scheduler and tracks them."""

    KIND: ClassVar[SchedulerKind]
    TICKET: ClassVar[str]  # file of an attempt's folder with the id of its job
    REASONS: ClassVar[Mapping[str, Reason]]  # state of a job that ended by itself -> reason

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self._time_limit_minutes = config.time_limit_minutes
        self._gpus_per_node = config.gpus_per_node
        self._clock = clock
        self._next_poll = 0.0
        self._jobs: dict[str, ScheduledJob] | None = None  # by name; None: not answered yet
        self._unreachable_reason = ""
        self._gone_since: dict[str, float] = {}
        self._killed: set[str] = set()

    @property
    def title(self) -> str:
        """Return the scheduler's name in sentences."""
        return self.KIND.title()

    # What a scheduler provides

    @abstractmethod
    def list_jobs(self) -> Mapping[str, ScheduledJob]:
        """Return our jobs that the scheduler knows, by name.

        Raises:
            SchedulerError: there is no answer.
        """

    @abstractmethod
    def nodes_program(self, folder: Path, num_nodes: int, num_processes: int) -> list[str]:
        """Return a module with its arguments that runs a training's ranks on its job's nodes.

        The training's own program, without its interpreter, follows.
        """

    @abstractmethod
    def inherited(self, document: Mapping[str, Any]) -> Sequence[str]:
        """Return the variables of the scheduler's job that the attempt's job gets."""

    @abstractmethod
    def submit(self, folder: AttemptFolder) -> str:
        """Submit an attempt and return its job's id.

        Raises:
            SchedulerUnreachableError: the scheduler does not answer.
            SchedulerError: it rejected the job.
        """

    @abstractmethod
    def ended_job(self, job_id: str) -> ScheduledJob | None:
        """Return a job that is no longer listed, or None if the scheduler has no record of it.

        Raises:
            SchedulerError: there is no answer.
        """

    @abstractmethod
    def cancel_waiting(self, job_id: str) -> None:
        """Take a job out of the queue if it has not started.

        Raises:
            SchedulerError: there is no answer, or the job has ended.
        """

    @abstractmethod
    def interrupt(self, job_id: str, grace_seconds: float) -> None:
        """Send SIGTERM to a running job's supervisor, which has this time to end the job.

        Raises:
            SchedulerError: there is no answer, or the job has ended.
        """

    @abstractmethod
    def kill(self, job_id: str) -> None:
        """End a job at once.

        Raises:
            SchedulerError: there is no answer, or the job has ended.
        """

    @staticmethod
    def job_name(folder: AttemptFolder) -> str:
        """Return the name of an attempt's job."""
        return f"{PREFIX}{folder.attempt_id}"

    def explain_kill(self) -> list[str]:
        """Return the program that says where the job ran who ended it from outside.

        It runs in the attempt's folder. This one asks the agent, which has ``end_words``; none
        for a scheduler that has them only of a job that has ended.
        """
        return [sys.executable, "-S", "-E", agent_end.__file__]

    # Polling

    def refresh(self, folders: Sequence[AttemptFolder]) -> None:
        """Query the scheduler if due, and perform pending submissions and cancellations."""
        open_ones = [folder for folder in folders if _is_open(folder)]
        if any(_asks_for_its_end(folder) for folder in open_ones):
            self._next_poll = 0.0
        if not open_ones or self._clock() < self._next_poll or not self._query():
            return
        try:
            self.send_together([each for each in open_ones if self._ticket(each) is None])
        except SchedulerUnreachableError as error:
            self._record_unreachable(error)
            return
        for folder in open_ones:
            try:
                if self._ticket(folder) is None:
                    self._send(folder)
                elif (job := self._job(folder)) is None or job.phase is Phase.ENDED:
                    self._gone_since.setdefault(folder.attempt_id, self._clock())
                elif (folder.path / child.STOP).exists():
                    self.stop(folder)
                self._report_end(folder)
            except LaunchRefusedError as refusal:
                folder.settle(refusal.reason, str(refusal))
            except SchedulerUnreachableError as error:
                self._record_unreachable(error)
                return

    def _query(self) -> bool:
        try:
            jobs = self.list_jobs()
        except SchedulerError as error:
            self._record_unreachable(error)
            return False
        self._jobs = dict(jobs)
        self._unreachable_reason = ""
        self._next_poll = self._clock() + POLL_SECONDS
        return True

    def _record_unreachable(self, error: SchedulerError) -> None:
        if str(error) != self._unreachable_reason:
            log.warning("%s does not answer: %s", self.title, error)
        self._unreachable_reason = str(error)
        self._next_poll = self._clock() + AWAY_SECONDS

    def _job(self, folder: AttemptFolder) -> ScheduledJob | None:
        return (self._jobs or {}).get(self.job_name(folder))

    def _report_end(self, folder: AttemptFolder) -> None:
        """Write why the scheduler ends a job where it is asked, or as soon as it says so."""
        job = self._job(folder)
        said = job.end_words if job else ""
        if said and not agent_end.read_answer(folder.path):
            words = f"{self.title} ended job {job.job_id if job else ''}: {said}"
            child.write_json(folder.path / agent_end.ANSWER_FILE, {"said": words})
        elif _asks_for_its_end(folder):
            child.write_json(folder.path / agent_end.ANSWER_FILE, {"said": ""})

    # Submitting

    def command(
        self, request: RunRequest, spec: JobSpec, argv: list[str], folder: Path
    ) -> tuple[list[str], dict[str, str]]:
        """Return the command, a training's over several ranks with the nodes' program before it.

        Each node runs a rank for each GPU that the host requests of it, without any the training's
        own number.

        Raises:
            LaunchRefusedError: the attempt is part of a gang of hosts, or no training, or it asks
                for what this scheduler does not have.
        """
        if unknown := [
            name for name in spec.scheduler_options if name not in SCHEDULER_OPTIONS[self.KIND]
        ]:
            raise LaunchRefusedError(
                Reason.VERSION_INCOMPATIBLE,
                f"{self.title} takes {', '.join(SCHEDULER_OPTIONS[self.KIND])} of a launch, "
                f"not {', '.join(unknown)}; launch the job without",
            )
        if request.gang is None:
            return argv, {}
        if request.gang.num_nodes > 1 or not isinstance(spec, TrainSpec):
            raise LaunchRefusedError(
                Reason.VERSION_INCOMPATIBLE,
                f"a {self.title} host takes a training over several nodes alone, as one job "
                "of several of its slots; choose this host alone for a training, or another one",
            )
        python, *program = argv
        ranks = self._gpus_per_node or request.gang.num_processes
        nodes = self.nodes_program(folder, max(1, len(request.devices)), ranks)
        return [python, "-m", *nodes, *program], {}

    def adapt(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return the document with a time limit below the scheduler's and its variables.

        It also has the program that says who ended the job.
        """
        latest_end = self.limit_minutes(document) * 60 - SCHEDULER_END_MARGIN_SECONDS
        requested = document.get("max_duration_seconds")
        shortest = latest_end if requested is None else min(float(requested), latest_end)
        return {
            **document,
            "max_duration_seconds": shortest,
            "inherit": [*document.get("inherit", ()), *self.inherited(document)],
            "explain_kill": self.explain_kill(),
        }

    def limit_minutes(self, document: Mapping[str, Any]) -> int:
        """Return the job's limit in the scheduler: its own plus a margin, or the host's."""
        return limit_minutes(document.get("max_duration_seconds"), self._time_limit_minutes)

    def launch(self, folder: AttemptFolder) -> None:
        """Submit the attempt; retried while the scheduler is unreachable.

        Raises:
            LaunchRefusedError: the scheduler rejects the job.
        """
        try:
            self._send(folder)
        except SchedulerUnreachableError as error:
            self._record_unreachable(error)

    def send_together(self, folders: Sequence[AttemptFolder]) -> None:  # noqa: B027 - optional
        """Submit at once what of the attempts that are not submitted yet may go together.

        Raises:
            SchedulerUnreachableError: the scheduler does not answer.
        """

    def _send(self, folder: AttemptFolder) -> None:
        """Submit the job, or adopt the existing job of this name."""
        name = self.job_name(folder)
        existing = self._accepted(self.list_jobs).get(name)
        if existing is None and (folder.path / child.STOP).exists():
            self._gone_since.setdefault(folder.attempt_id, -math.inf)
            return
        job_id = existing.job_id if existing else self._accepted(lambda: self.submit(folder))
        child.write_json(folder.path / self.TICKET, {"job_id": job_id, "name": name})
        self._next_poll = 0.0

    def _accepted(self, request: Callable[[], T]) -> T:
        """Return what a request of a launch yields; a refusal of it ends the attempt."""
        try:
            return request()
        except SchedulerUnreachableError:
            raise
        except SchedulerError as refusal:
            raise LaunchRefusedError(
                Reason.PREFLIGHT_FAILED,
                f"{self.title} refused the job: {refusal}; see "
                f'"{self.KIND}" in the host\'s config.json',
            ) from None

    # Verdicts

    def verdict_of(self, folder: AttemptFolder) -> Verdict:
        """Return an attempt's state from its files and, if they do not decide, from its job.

        This machine's boot id does not apply: the job runs on another machine.
        """
        claim = folder.claim()
        verdict = folder.verdict(claim.boot_id if claim else "")
        if verdict is Verdict.FINISHED and not folder.is_settled:
            return Verdict.RUNNING if self._is_active(folder) else verdict
        if verdict not in LOST_REASONS or self._is_gone(folder):
            return verdict
        has_begun = (folder.path / child.SUPERVISOR).exists()
        return Verdict.RUNNING if has_begun or self._is_active(folder) else Verdict.WAITING

    def _is_active(self, folder: AttemptFolder) -> bool:
        job = self._job(folder)
        return job is not None and job.phase is Phase.ACTIVE

    def _is_gone(self, folder: AttemptFolder) -> bool:
        """Return whether the job ended so long ago that no more files will appear."""
        job = self._job(folder)
        if job is not None and job.phase is not Phase.ENDED:
            self._gone_since.pop(folder.attempt_id, None)
            return False
        since = self._gone_since.get(folder.attempt_id)
        return since is not None and self._clock() - since >= SCHEDULER_SETTLE_SECONDS

    def waits_for(self, folder: AttemptFolder) -> str:
        """Return the scheduler's reason why the job is pending."""
        if self._unreachable_reason:
            return f"{self.title} does not answer its host"
        ticket, job = self._ticket(folder), self._job(folder)
        number = f" (job {ticket['job_id']})" if ticket else ""
        words = f": {job.detail or 'not checked yet'}" if job else ""
        return f"{self.title}{number}{words}"

    def unrecorded_end(self, folder: AttemptFolder, verdict: Verdict) -> UnrecordedEnd | None:
        """Return the scheduler's reason for an end without an exit record."""
        if verdict not in LOST_REASONS:
            return None
        order = child.read_json(folder.path / child.STOP) or {}
        ordered_reason = Reason(order["reason"]) if order.get("reason") in set(Reason) else None
        ticket = self._ticket(folder)
        if ticket is None:
            return UnrecordedEnd(
                ordered_reason or LOST_REASONS[verdict], f"it was never sent to {self.title}"
            )
        job = self._job(folder) or self._ended_job(ticket["job_id"])
        if job is None:
            return UnrecordedEnd(
                ordered_reason or LOST_REASONS[verdict],
                f"{self.title} has no record of job {ticket['job_id']}",
            )
        where = f" on {job.nodes}" if job.nodes else ""
        words = f": {job.end_words}" if job.end_words else ""
        sentence = f"{self.title} job {job.job_id} ended{where} as {job.state}{words}"
        reason = self.REASONS.get(job.state, LOST_REASONS[verdict])
        is_ours = ordered_reason is not None and reason in (
            Reason.KILLED_EXTERNALLY,
            LOST_REASONS[verdict],
        )
        return UnrecordedEnd(ordered_reason if is_ours and ordered_reason else reason, sentence)

    def _ended_job(self, job_id: str) -> ScheduledJob | None:
        try:
            return self.ended_job(job_id)
        except SchedulerError:
            return None

    # Stopping

    def stop(self, folder: AttemptFolder) -> None:
        """Cancel a pending job, or signal a running job's supervisor to stop.

        A job that outlasts its grace by ``SCHEDULER_KILL_MARGIN_SECONDS`` is cancelled as a whole.
        """
        ticket, job = self._ticket(folder), self._job(folder)
        if ticket is None:
            return
        try:
            if job is None or job.phase is Phase.WAITING:
                self.cancel_waiting(ticket["job_id"])
            if job is None or job.phase is Phase.ACTIVE:
                self._end(folder, ticket["job_id"])
            self._next_poll = min(self._next_poll, self._clock() + POLL_SECONDS / 10)
        except SchedulerUnreachableError as error:
            self._record_unreachable(error)
        except SchedulerError as refusal:  # the job has already ended
            log.info("job %s: %s", ticket["job_id"], refusal)

    def _end(self, folder: AttemptFolder, job_id: str) -> None:
        order = folder.path / child.STOP
        grace = float((child.read_json(order) or {}).get("grace_seconds", STOP_GRACE_SECONDS))
        if time.time() - order.stat().st_mtime > grace + SCHEDULER_KILL_MARGIN_SECONDS:
            if folder.attempt_id not in self._killed:
                log.warning("job %s outlasted its grace and is cancelled", job_id)
            self._killed.add(folder.attempt_id)
            self.kill(job_id)
        else:
            self.interrupt(job_id, grace)

    def _ticket(self, folder: AttemptFolder) -> dict[str, Any] | None:
        return child.read_json(folder.path / self.TICKET)


def limit_minutes(seconds: float | None, most_minutes: int) -> int:
    """Return the limit with which a job of a duration is submitted, at most the host's own.

    >>> limit_minutes(None, 1440), limit_minutes(3600.0, 1440), limit_minutes(1e6, 1440)
    (1440, 62, 1440)
    """
    if seconds is None:
        return max(LEAST_LIMIT_MINUTES, most_minutes)
    minutes = math.ceil((float(seconds) + SCHEDULER_END_MARGIN_SECONDS) / 60) + 1
    return max(LEAST_LIMIT_MINUTES, min(minutes, most_minutes))


def _asks_for_its_end(folder: AttemptFolder) -> bool:
    """Return whether an attempt's supervisor waits to hear who ended its job."""
    is_asking = (folder.path / agent_end.REQUEST_FILE).exists()
    return is_asking and agent_end.read_answer(folder.path) is None


def _is_open(folder: AttemptFolder) -> bool:
    """Return whether an attempt was claimed and is not settled yet."""
    claim = folder.claim()
    verdict = folder.verdict(claim.boot_id) if claim else Verdict.DAMAGED
    is_live = verdict in LOST_REASONS or verdict is Verdict.RUNNING
    return is_live or (verdict is Verdict.FINISHED and not folder.is_settled)
