"""Two good hosts, a person who reads, and what becomes of them beside a hostile host."""

import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.stack import FINAL, ApiClient, wait_for
from tests.system.faults import counted_agent
from tests.system.faults.attack import Attack
from tests.system.faults.contract import host_without_agent
from tests.system.faults.parts import Desk
from tests.system.faults.site import Site

GOOD, BAD = ("ada", "bea"), "mallory"
STEPS = 100  # of a good host's job, of 50 ms each
OPEN_JOBS = 2  # of a good host at any time
SAMPLE_SECONDS = 2.0
LOOK_SECONDS = 0.5
STATUS = re.compile(r'" (\d{3})(?: |$)')
FAULT = re.compile(r"^(\w+(?:\.\w+)*(?:Error|Exception|Problem|Timeout)\b.*)", re.MULTILINE)
PARTS = ("web", "control", "ticker")


class Measured(NamedTuple):
    """What one stretch of time did to the good hosts and to the site."""

    seconds: float
    heartbeats: int
    lost: int  # heartbeats that were not answered
    slowest_seconds: float  # answer to a heartbeat
    jobs: int
    wrong: list[str]  # jobs of good hosts that did not end well
    events_missing: list[Any]
    pages: int
    statuses: dict[str, int]  # by which the web process answered anybody
    cores: dict[str, float]  # that each part kept busy, in the mean
    megabytes: dict[str, tuple[float, float]]  # of each part, at the start and at the end


def begin(folder: Path, **environment: str) -> Site:
    """Return a site with two good hosts, whose heartbeats are counted, and one to abuse."""
    site = Site(folder, **environment)
    site.commands["web"].remove("--no-access-log")
    site.start()
    site.desk.close()
    site.desk = Desk(site.environment, site.logs / "desk.log", "tests.system.faults.more_calls")
    for name in GOOD:
        site.enrol(name, folder / "hosts" / name)
        site.wait_for_contact(name, "live")
        site.commands[name][site.commands[name].index("runners")] = counted_agent.__name__
        site.kill_tree(name)
        site.begin(name)
    host_without_agent(site, BAD)
    wait_for(lambda: all(sent(site, name) for name in GOOD), "the first heartbeats")
    return site


def sent(site: Site, name: str) -> dict[str, Any]:
    """Return what a good host's agent counted; nothing yet before its first heartbeat."""
    try:
        return counted_agent.counted(site.hosts[name])
    except FileNotFoundError:
        return {}


class Neighbours:
    """Keeps good hosts busy and pages read for a while, and measures what came of it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._reader = ApiClient(site.port, "olga")
        self._jobs: dict[str, list[str]] = {name: [] for name in GOOD}
        self._pages = 0
        self._is_over = threading.Event()

    def measure(self, seconds: float, attack: Attack | None, num_messages: int = 0) -> Measured:
        """Let the good hosts work for so long, beside an attack if there is one."""
        self._jobs = {name: [] for name in GOOD}
        self._pages, self._is_over = 0, threading.Event()
        counts, statuses = self._heartbeats(), self._statuses()
        before, spent = self._megabytes(), self._cpu_seconds()
        reading = threading.Thread(target=self._read, daemon=True)
        reading.start()
        started = time.monotonic()
        attacking = threading.Thread(
            target=lambda: attack and attack.run(seconds=seconds, num_messages=num_messages)
        )
        attacking.start()
        while time.monotonic() - started < seconds or attacking.is_alive():
            self._feed()
            time.sleep(LOOK_SECONDS)
        took, self._spent = time.monotonic() - started, self._cpu_seconds()
        after = self._megabytes()
        self._is_over.set()
        reading.join()
        views = self._ended()
        now = self._heartbeats()
        return Measured(
            seconds=took,
            heartbeats=sum(now[name]["sent"] - counts[name]["sent"] for name in GOOD),
            lost=sum(_lost(now[name]) - _lost(counts[name]) for name in GOOD),
            slowest_seconds=max(one["slowest_seconds"] for one in now.values()),
            jobs=len(views),
            wrong=[f"{job}: {view}" for job, view in views.items() if not _is_well(view)],
            events_missing=self.site.desk.events_missing(slugs=list(GOOD)),
            pages=self._pages,
            statuses=dict(sorted((self._statuses() - statuses).items())),
            cores={name: (self._spent[name] - spent[name]) / took for name in PARTS},
            megabytes={name: (before[name], after[name]) for name in PARTS},
        )

    def faults(self) -> dict[str, int]:
        """Return the exceptions that the server's parts wrote into their logs."""
        texts = "\n".join(self.site.log(name) for name in PARTS)
        return dict(Counter(found[:200] for found in FAULT.findall(texts)))

    def _feed(self) -> None:
        for name in GOOD:
            if self._num_open(name) < OPEN_JOBS:
                self._jobs[name].append(self.site.submit(name, steps=STEPS))

    def _num_open(self, name: str) -> int:
        return len(self.site.desk.open_jobs(slugs=[name]))

    def _ended(self) -> dict[str, dict[str, Any]]:
        """Return the jobs of good hosts once all have ended and all is told."""
        jobs = [job for each in self._jobs.values() for job in each]
        over = {*FINAL}
        wait_for(
            lambda: all(self.site.view(job)["state"] in over for job in jobs), "the jobs' ends"
        )
        self.site.jobs = jobs
        wait_for(self.site._is_told, "the rest of every spool")
        return {job: self.site.view(job) for job in jobs}

    def _read(self) -> None:
        """Open pages as a person does, those about the hostile host among them."""
        paths = ["/", "/jobs/", "/hosts/", f"/hosts/{BAD}/", "/queue/", f"/hosts/{GOOD[0]}/"]
        while not self._is_over.is_set():
            for path in [*paths, *self._pages_of_jobs()]:
                self._reader.request("GET", path)
                self._pages += 1
                if self._is_over.wait(0.1):
                    return

    def _pages_of_jobs(self) -> list[str]:
        """Return the pages of the hostile host's newest job, of a good one's before it has any."""
        newest = next(
            filter(None, (self.site.desk.newest_job(slug=one) for one in (BAD, *GOOD))), ""
        )
        if not newest:
            return []
        tabs = (
            "",
            "logs/",
            "metrics/",
            "post-mortem/",
            "artefacts/",
            "events/",
            "config/",
            "figures.csv",
        )
        api = (f"/api/v1/jobs/{newest}/{name}" for name in ("events", "figures"))
        return [*(f"/jobs/{newest}/{tab}" for tab in tabs), *api]

    def _heartbeats(self) -> dict[str, dict[str, Any]]:
        return {name: sent(self.site, name) for name in GOOD}

    def _statuses(self) -> Counter[str]:
        return Counter(STATUS.findall(self.site.log("web")))

    def _cpu_seconds(self) -> dict[str, float]:
        return {
            name: sum(psutil.Process(self.site.processes[name].pid).cpu_times()[:2])
            for name in PARTS
        }

    def _megabytes(self) -> dict[str, float]:
        """Return the resident memory of each part in MB, the middle of three looks."""
        looks: dict[str, list[float]] = {name: [] for name in PARTS}
        for _ in range(3):
            for name in PARTS:
                process = psutil.Process(self.site.processes[name].pid)
                looks[name].append(process.memory_info().rss / 1e6)
            time.sleep(SAMPLE_SECONDS / 4)
        return {name: sorted(values)[1] for name, values in looks.items()}


def _lost(counts: dict[str, Any]) -> int:
    return int(counts["sent"] - counts["answered"])


def _is_well(view: dict[str, Any]) -> bool:
    attempts = view["attempts"]
    return view["state"] == "succeeded" and len(attempts) == 1 and view["num_steps"] == STEPS


def told(name: str, measured: Measured, attack: Attack | None = None) -> str:
    """Return what is printed of a stretch of time."""
    memory = ", ".join(
        f"{part} {begin:.0f} → {end:.0f} MB ({100 * (end / begin - 1):+.1f} %)"
        for part, (begin, end) in measured.megabytes.items()
    )
    said = (
        f"{name}: {measured.seconds:.0f} s; {measured.heartbeats} heartbeats of good hosts, "
        f"{measured.lost} lost, slowest {measured.slowest_seconds:.2f} s; {measured.jobs} jobs, "
        f"{len(measured.wrong)} wrong; {len(measured.events_missing)} attempts lack events; "
        f"{measured.pages} pages read; answers {measured.statuses}; {memory}; cores "
        f"{ {part: round(busy, 2) for part, busy in measured.cores.items()} }"
    )
    if attack is None:
        return said
    means = {name: took / attack.sent[name] for name, took in attack.seconds.items()}
    slowest = sorted(means, key=lambda name: -means[name])[:8]
    return (
        f"{said}\n  {sum(attack.sent.values()):,} hostile messages of {len(attack.sent)} shapes, "
        f"at least {min(attack.sent.values()):,} of each; answered "
        f"{dict(sorted(attack.answers.items()))}\n  not sent: {Counter(attack.failures)}\n"
        f"  ms each: { {name: round(1000 * means[name]) for name in slowest} }"
    )
