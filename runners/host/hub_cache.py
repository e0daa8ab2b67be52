"""The models in the Hub's cache of a host: reported, deleted on order, pruned by the host's rule.

The cache may hold what other tools have downloaded, too. It is looked at every few seconds by the
times of its folders, and read by a process of its own where something has changed.
"""

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from runners.hub.links import measured_rates
from runners.hub.pruning import PRUNED_FOLDER, RULE_FILE, PruneRule, read_rule
from runners.hub.settings import cache_folder
from runners.hub.store import repository_folders
from runners.launchers import launch
from runners.shared.config import HostDir
from runners.shared.log_text import last_line
from runners.shared.messages import (
    MAX_CACHED,
    CachedModel,
    CacheOrders,
    CacheReport,
    LinkReport,
    PrunedModel,
)
from runners.shared.timing import scale_duration
from runners.supervision import child

PROGRAM = "runners.host.hub_cache_program"
LOOK_SECONDS = scale_duration(15.0, least=0.2)  # between two looks at the folders' times
READ_SECONDS = 600.0  # between two readings of an unchanged cache: when models were used
RETRY_SECONDS = scale_duration(10.0, least=0.2)  # while orders wait
LONGEST_SECONDS = 600.0  # of a reading: a large cache on a slow disk
SHOWN = 300  # characters of a problem

log = logging.getLogger(__name__)
Signature = tuple[tuple[str, int], ...]  # folders and when they changed


class _Report(NamedTuple):
    """A report, and the files that say what was pruned: deleted when the server has it."""

    message: CacheReport
    notes: tuple[Path, ...]


class HubCache:
    """The Hub's cache of one host; ``step`` runs in a thread of its own."""

    def __init__(self, host_dir: HostDir) -> None:
        self._host_dir = host_dir
        self._orders = CacheOrders()
        self._rule = read_rule(host_dir.path)
        self._models: tuple[CachedModel, ...] | None = None  # None: not read yet
        self._current: _Report | None = None
        self._sent: _Report | None = None
        self._reported: _Report | None = None
        self._problems: tuple[str, ...] = ()
        self._seen: tuple[Signature, PruneRule] | None = None
        self._waited = 0.0
        self._lock = threading.Lock()

    @property
    def problems(self) -> tuple[str, ...]:
        """Return why orders could not be carried out, one sentence each."""
        return self._problems

    def obey(self, orders: CacheOrders | None) -> bool:
        """Take the pending orders and the rule for the next step; return whether they are new.

        The rule is stored for jobs that download. The server repeats an order until a report shows
        that it was carried out.
        """
        wanted = orders or CacheOrders()
        rule = PruneRule()
        if wanted.keep_bytes is not None:
            rule = PruneRule(wanted.keep_bytes, frozenset(wanted.kept))
        if rule != self._rule:
            child.write_json(self._host_dir.path / RULE_FILE, rule.document())
        with self._lock:
            is_new = bool(set(wanted.delete) - set(self._orders.delete))
            is_new = is_new or rule.keep_bytes != self._rule.keep_bytes
            self._orders, self._rule = wanted, rule
        return is_new

    def step(self) -> float:
        """Carry out the pending orders, read the cache anew if it changed; return the pause."""
        with self._lock:
            delete, rule = self._orders.delete, self._rule
        env = launch.render_env(self._host_dir.path, 1) | launch.hub_env()
        now = (_signature(cache_folder(env)), rule)
        if delete or now != self._seen or self._waited >= READ_SECONDS:
            self._waited = 0.0
            self._read(delete, rule, env)
            self._seen = (_signature(cache_folder(env)), rule)
        self._report(is_repeated=bool(delete))
        pause = RETRY_SECONDS if delete else LOOK_SECONDS
        self._waited += pause
        return pause

    def _read(self, delete: tuple[str, ...], rule: PruneRule, env: Mapping[str, str]) -> None:
        """Run the program that reads the cache; keep what is known if it fails."""
        if not cache_folder(env).is_dir():
            self._models, self._problems = (), ()
            return
        order = {"delete": delete, "rule": rule.document()}
        try:
            ended = subprocess.run(
                [sys.executable, "-m", PROGRAM, str(self._host_dir.path)],
                input=json.dumps(order) + "\n",
                capture_output=True,
                text=True,
                errors="replace",
                timeout=LONGEST_SECONDS,
                check=False,
                env=dict(env),
            )
        except subprocess.TimeoutExpired:
            self._fail(f"reading took longer than {LONGEST_SECONDS:g} s")
            return
        try:
            answer = json.loads(ended.stdout)
            if "models" in answer:
                self._models = tuple(map(CachedModel.model_validate, answer["models"]))
            self._problems = tuple(str(each)[:SHOWN] for each in answer["problems"])
        except (ValueError, LookupError, TypeError):
            self._fail(last_line(ended.stderr, f"code {ended.returncode}, no message"))

    def _fail(self, why: str) -> None:
        log.warning("the Hub's cache cannot be read: %s", why)
        self._problems = (f"The models in the Hub's cache are not known: {why}."[:SHOWN],)

    def _report(self, *, is_repeated: bool) -> None:
        """Make a new report if there is anything new, or if an order awaits it."""
        if self._models is None:
            return
        pruned = _pruned(self._host_dir.path / PRUNED_FOLDER)
        message = CacheReport(
            models=self._models,
            pruned=tuple(pruned.values()),
            links=tuple(_links(self._host_dir.path)),
        )
        if is_repeated or self._current is None or message != self._current.message:
            self._current = _Report(message, tuple(pruned))

    def news(self, *, everything: bool) -> CacheReport | None:
        """Return what the cache holds, or None if unknown or unchanged since the last report."""
        self._sent = self._current
        if self._sent is None or (self._sent is self._reported and not everything):
            return None
        return self._sent.message

    def mark_reported(self) -> None:
        """Record that the server received the last report."""
        self._reported = self._sent
        for path in self._sent.notes if self._sent else ():
            path.unlink(missing_ok=True)


def _signature(cache: Path) -> Signature:
    """Return the folders of a cache that change when a file comes or goes, with their times."""
    found = []
    for repository in repository_folders(cache):
        for folder in (repository, repository / "blobs", *repository.glob("snapshots/*")):
            try:
                found.append((str(folder), folder.stat().st_mtime_ns))
            except OSError:  # deleted meanwhile, or never made
                continue
    return tuple(found)


def _links(host_dir: Path) -> Iterator[LinkReport]:
    """Yield what this host measured of each link; a file that says else is none of ours."""
    for name, rate in sorted(measured_rates(host_dir).items()):
        with suppress(ValidationError):
            yield LinkReport(
                link=name,
                address=rate.address,
                bytes_per_second=rate.median,
                low=rate.low,
                high=rate.high,
                num_transfers=rate.num_transfers,
                is_limited=rate.is_limited,
            )


def _pruned(folder: Path) -> dict[Path, PrunedModel]:
    """Return what was pruned and not reported yet, by the file that says so."""
    found: dict[Path, PrunedModel] = {}
    for path in sorted(folder.glob("[!.]*.json"))[:MAX_CACHED]:
        try:
            found[path] = PrunedModel.model_validate_json(path.read_bytes())
        except ValidationError:
            path.unlink(missing_ok=True)
        except OSError:
            continue
    return found
