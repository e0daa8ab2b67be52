"""Jobs that somebody else gave to this host's scheduler, read by order of the site.

The site names them with every heartbeat until it knows how they ended; what is new goes with the
next heartbeat. They are only read: nothing here submits, signals or ends a job.
"""

import logging
import threading
from collections.abc import Mapping, Sequence

from runners.host.schedulers import SCHEDULERS
from runners.launchers.observing import unknown
from runners.launchers.scheduler import SchedulerError
from runners.shared.config import HostConfig
from runners.shared.observed import MOST_OBSERVED, ObservedJobReport
from runners.shared.timing import scale_duration

READ_SECONDS = scale_duration(15.0, least=0.5)
IDLE_SECONDS = 3600.0  # without an order
REPORTED_AT_ONCE = 10  # of a heartbeat, which stays small

log = logging.getLogger(__name__)


class ObservedJobs:
    """The jobs that the site wants to be told of; ``step`` runs in a thread of its own."""

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._wanted: tuple[str, ...] = ()
        self._found: Mapping[str, ObservedJobReport] = {}
        self._sent: tuple[ObservedJobReport, ...] = ()
        self._reported: dict[str, ObservedJobReport] = {}
        self._lock = threading.Lock()

    def obey(self, job_ids: Sequence[str]) -> bool:
        """Take the jobs of a reply; return whether there are new ones."""
        wanted = tuple(job_ids[:MOST_OBSERVED])
        with self._lock:
            is_new = bool(set(wanted) - set(self._wanted))
            self._wanted = wanted
            kept = {name: each for name, each in self._reported.items() if name in wanted}
            self._reported = kept
        return is_new

    def step(self) -> float:
        """Read the jobs; return the seconds until the next step."""
        wanted = self._wanted
        if not wanted:
            self._found = {}
            return IDLE_SECONDS
        found = {each.job_id: each for each in self._read(wanted)}
        with self._lock:
            self._found = found
        return READ_SECONDS

    def _read(self, wanted: Sequence[str]) -> Sequence[ObservedJobReport]:
        chosen = self._config.scheduler
        observe = SCHEDULERS[chosen.KIND].observe if chosen else None
        if observe is None:
            problem = "this host has no scheduler whose jobs it reads"
            return [unknown(each, problem) for each in wanted]
        try:
            return observe(chosen, wanted)
        except SchedulerError as error:
            log.info("jobs of others are not read: %s", error)
            return [unknown(each, f"the scheduler does not tell: {error}") for each in wanted]

    def news(self) -> tuple[ObservedJobReport, ...]:
        """Return the reports that the site does not have, some of them if they are many."""
        with self._lock:
            new = [each for name, each in self._found.items() if self._reported.get(name) != each]
            self._sent = tuple(new[:REPORTED_AT_ONCE])
        return self._sent

    def mark_reported(self) -> None:
        """Note that the site has what ``news`` returned last."""
        with self._lock:
            self._reported |= {each.job_id: each for each in self._sent}
            self._sent = ()
