"""What every answer used, kept on disk before its end is sent, and counted in the database once.

An answer is a line of the gateway's journal file. A thread counts new lines and stores, in the
same transaction, how many bytes of the file it has counted: a gateway or database that dies at
any point loses nothing and counts nothing twice. Files that a dead gateway left are counted by
the next one.
"""

import fcntl
import json
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import date
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import structlog
from django.db import close_old_connections, transaction
from django.db.models import F

from webapp.core.clock import now
from webapp.core.ids import new_ulid
from webapp.deployments.models import Deployment, ServingKey, Usage, UsageJournal

COUNT_SECONDS = 1.0
MOST_BYTES = 8 * 1024**2  # of a file, before the next one is begun
log = structlog.get_logger(__name__)


class Used(NamedTuple):
    """The tokens of one answer; ``cached`` are of the prompt's."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    @property
    def total(self) -> int:
        """Return the tokens that count against a limit."""
        return self.prompt + self.completion


class Answer(NamedTuple):
    """One answer: for whom, of what, how it ended."""

    key_id: str
    deployment_id: str
    day: str  # ISO date, UTC
    status: int
    is_cut: bool  # the client left, the host was lost, or the key was revoked
    used: Used

    @property
    def is_failed(self) -> bool:
        """Return whether the service, not the client, is the reason that there is no answer."""
        return self.status >= HTTPStatus.INTERNAL_SERVER_ERROR


class Journal:
    """The answers of one gateway process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._pending: Counter[str] = Counter()  # tokens by key that the database does not have
        self._file: int | None = None
        self._path = folder
        self._size = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)

    def start(self) -> None:
        """Count from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Count what is there, and end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._close()

    def add(self, answer: Answer) -> None:
        """Keep an answer; it is on disk when this returns, unless the disk is full."""
        line = json.dumps([*answer[:-1], *answer.used], separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._pending[answer.key_id] += answer.used.total
            try:
                os.write(self._opened(), line)
                self._size += len(line)
            except OSError as error:
                log.warning("an answer is not counted", cause=str(error), answer=answer)

    def pending_tokens(self, key_id: str) -> int:
        """Return the tokens of a key that are not counted in the database yet."""
        return self._pending[key_id]

    def _opened(self) -> int:
        """Return the open file; a lock on it says that its gateway lives."""
        if self._file is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path = self._folder / f"{new_ulid()}.jsonl"
            flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self._path, flags, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._size = 0
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _run(self) -> None:
        while True:
            is_last = self._stop.wait(COUNT_SECONDS)
            try:
                self.count()
            except Exception as error:
                log.warning("usage is not counted yet", cause=str(error), exc_info=True)
            close_old_connections()
            if is_last:
                return

    def count(self) -> None:
        """Count what is new in this gateway's file, and the files that dead ones left."""
        with self._lock:
            path = self._path if self._file is not None else None
        if path is not None:
            self._pending.subtract(count_file(path))
            with self._lock:
                if self._size > MOST_BYTES:
                    self._close()  # the next look takes it for one that is left
        for left in left_files(self._folder):
            tokens = count_file(left)
            if left == path:  # filled, and closed above
                self._pending.subtract(tokens)
            left.unlink()
            UsageJournal.objects.filter(pk=left.stem).delete()


def left_files(folder: Path) -> list[Path]:
    """Return the journals in a folder that no living gateway writes."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            continue
        found.append(path)
    return found


def count_file(path: Path) -> Counter[str]:
    """Count the whole lines of a journal that are not counted yet; return the tokens by key."""
    with transaction.atomic():
        UsageJournal.objects.get_or_create(pk=path.stem)
        row = UsageJournal.objects.select_for_update().get(pk=path.stem)
        with path.open("rb") as file:
            file.seek(row.counted_bytes)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        if not whole:
            return Counter()
        answers = [_answer(line) for line in whole.splitlines()]
        _store(answers)
        fenced = UsageJournal.objects.filter(pk=row.pk, counted_bytes=row.counted_bytes)
        if not fenced.update(counted_bytes=row.counted_bytes + len(whole)):
            transaction.set_rollback(True)  # another process counted it meanwhile
            return Counter()
    tokens: Counter[str] = Counter()
    for each in answers:
        tokens[each.key_id] += each.used.total
    return tokens


def _answer(line: bytes) -> Answer:
    key_id, deployment_id, day, status, is_cut, *used = json.loads(line)
    return Answer(key_id, deployment_id, day, status, is_cut, Used(*used))


def _store(answers: Iterable[Answer]) -> None:
    groups: dict[tuple[str, str, str], list[Answer]] = defaultdict(list)
    for each in answers:
        groups[each.key_id, each.deployment_id, each.day].append(each)
    keys = _known(ServingKey, {each[0] for each in groups})
    deployments = _known(Deployment, {each[1] for each in groups})
    for (key_id, deployment_id, day), group in sorted(groups.items()):
        if key_id not in keys or deployment_id not in deployments:
            continue  # of a team that was deleted
        row, _ = Usage.objects.get_or_create(
            key_id=key_id, deployment_id=deployment_id, day=date.fromisoformat(day)
        )
        Usage.objects.filter(pk=row.pk).update(
            requests=F("requests") + len(group),
            failed=F("failed") + sum(each.is_failed for each in group),
            cut=F("cut") + sum(each.is_cut for each in group),
            prompt_tokens=F("prompt_tokens") + sum(each.used.prompt for each in group),
            cached_tokens=F("cached_tokens") + sum(each.used.cached for each in group),
            completion_tokens=F("completion_tokens") + sum(each.used.completion for each in group),
        )
    ServingKey.objects.filter(pk__in=keys).update(last_used_at=now())


def _known(model: type[ServingKey | Deployment], keys: set[str]) -> set[str]:
    return set(model.objects.filter(pk__in=keys).values_list("pk", flat=True))
