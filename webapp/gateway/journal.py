"""What every answer used, kept on disk before it is sent, and counted in the database once.

An answer that is being sent has a slot in a file that is mapped into memory, which outlives the
process; one that has ended is a line of the journal beside it. A thread counts new lines and
stores, in the same transaction, how many bytes it has counted: a gateway or database that dies at
any point loses nothing and counts nothing twice. What a dead gateway left, its open answers too,
is counted by the next one.
"""

import fcntl
import json
import mmap
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import structlog
from django.db import DatabaseError, close_old_connections, transaction
from django.db.models import F

from runners.shared.event_streams import TokensUsed
from webapp.core.clock import now
from webapp.core.ids import new_ulid
from webapp.deployments.models import Deployment, ServingKey, Usage, UsageJournal
from webapp.deployments.usage import periods_of

COUNT_SECONDS = 1.0
MOST_BYTES = 8 * 1024**2  # of a journal, before the next one is begun
OPEN = ".open"  # suffix of the file with the open answers
NUM_SLOTS, SLOT_BYTES = 4096, 192  # answers that are being sent at the same time
FLAGS = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
NO_SLOT = -1  # more are open than there are slots
log = structlog.get_logger(__name__)
Tokens = Counter[tuple[str, str]]  # by key and period of its limits


class Answer(NamedTuple):
    """One answer: for whom, of what, how it ended."""

    id: str
    key_id: str
    deployment_id: str
    day: str  # ISO date, UTC
    status: int
    is_cut: bool  # the client left, the host was lost, the key was revoked, or the gateway died
    used: TokensUsed

    @property
    def is_failed(self) -> bool:
        """Return whether the service, not the client, is the reason that there is no answer."""
        return self.status >= HTTPStatus.INTERNAL_SERVER_ERROR

    @property
    def num_tokens(self) -> int:
        """Return the tokens that count against a limit."""
        return self.used.prompt + self.used.completion

    @property
    def line(self) -> bytes:
        """Return the answer as a line of the journal."""
        return json.dumps([*self[:-1], *self.used], separators=(",", ":")).encode() + b"\n"


def read_answer(line: bytes) -> Answer:
    """Return the answer of a line.

    Raises:
        ValueError: it is none.
    """
    id_, key, deployment, day, status, is_cut, *used = json.loads(line)
    return Answer(id_, key, deployment, day, status, is_cut, TokensUsed(*used))


class OpenAnswer:
    """An answer that is being sent; what it used so far outlives the process."""

    def __init__(self, journal: "Journal", answer: Answer, slot: int) -> None:
        self.answer = answer
        self.slot = slot
        self._journal = journal

    def note(self, used: TokensUsed) -> None:
        """Keep what was used so far, before the part of the answer that used it is sent."""
        if used != self.answer.used:
            self.answer = self.answer._replace(used=used)
            self._journal.keep_open(self)

    def move(self, deployment_id: str) -> None:
        """Keep that another deployment answers, which the answer counts for."""
        if deployment_id != self.answer.deployment_id:
            self.answer = self.answer._replace(deployment_id=deployment_id)
            self._journal.keep_open(self)

    def end(self, status: int, *, is_cut: bool) -> None:
        """Keep how the answer ended; it is on disk when this returns, unless the disk is full."""
        self.answer = self.answer._replace(status=status, is_cut=is_cut)
        self._journal.end(self)


class Journal:
    """The answers of one gateway process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._pending: Tokens = Counter()  # that the snapshot of the database does not have
        self._counted: Tokens = Counter()  # of them, those that the database has
        self._files: _Files | None = None
        self._open: dict[int, OpenAnswer] = {}  # by slot
        self._free: list[int] = list(range(NUM_SLOTS))
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
        with self._lock:
            self._close()

    def begin(self, key_id: str, deployment_id: str) -> OpenAnswer:
        """Keep that an answer is begun; ``end`` it in any case."""
        day = now().date().isoformat()
        answer = Answer(new_ulid(), key_id, deployment_id, day, 0, is_cut=True, used=TokensUsed())
        with self._lock:
            slot = self._free.pop() if self._free else NO_SLOT
            opened = OpenAnswer(self, answer, slot)
            if slot != NO_SLOT:
                self._open[slot] = opened
        self.keep_open(opened)
        return opened

    def keep_open(self, opened: OpenAnswer) -> None:
        """Write an open answer into its slot; on a full disk it is lost if the gateway dies."""
        if opened.slot == NO_SLOT:
            return
        with self._lock:
            try:
                self._current().write_slot(opened.slot, opened.answer.line)
            except OSError as error:
                log.warning("an open answer is not kept", cause=str(error))

    def end(self, opened: OpenAnswer) -> None:
        """Write the line of an answer, then give its slot back."""
        answer = opened.answer
        with self._lock:
            try:
                self._current().append(answer.line)
                self._pending.update(tokens_by_period([answer]))
            except OSError as error:
                log.warning("an answer is not counted", cause=str(error), answer=answer)
            if self._open.pop(opened.slot, None) is not None:
                self._free.append(opened.slot)
                if self._files is not None:
                    self._files.write_slot(opened.slot, b"")

    def pending_tokens(self, key_id: str, period: str) -> int:
        """Return the tokens of a key in a period that the snapshot does not have yet."""
        return self._pending[key_id, period]

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Drop at the block's end what the database had at its begin: the block has read it.

        Until then tokens are in one of the two, at times in both, and never in none, so that no
        request slips through between a count and the next look.
        """
        with self._lock:
            settled = self._counted.copy()
        yield
        with self._lock:
            for each in (self._pending, self._counted):
                each.subtract(settled)
                for key in settled:
                    if not each[key]:
                        del each[key]

    def _current(self) -> "_Files":
        while self._files is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files = _Files.made(self._folder / f"{new_ulid()}.jsonl")
        return self._files

    def _close(self) -> None:
        if self._files is not None:
            self._files.close()
            self._files = None

    def _change_files(self) -> None:
        """Go on in new files, unless the disk is full; answers that are open move along."""
        before, self._files = self._files, None
        try:
            fresh = self._current()
        except OSError as error:
            self._files = before
            log.warning("a journal is not changed yet", cause=str(error))
            return
        for slot, opened in self._open.items():
            fresh.write_slot(slot, opened.answer.line)
            if before is not None:
                before.write_slot(slot, b"")
        if before is not None:
            before.close()

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
        """Count what is new in this gateway's journal, and what dead ones left."""
        with self._lock:
            files = self._files
            has_new = files is not None and files.num_bytes > files.num_counted
        if files is not None and has_new:
            num_bytes = files.num_bytes
            tokens = count_file(files.path)
            with self._lock:
                self._counted.update(tokens)
                files.num_counted = num_bytes
                if files.num_bytes > MOST_BYTES:
                    self._change_files()
        for left in sorted(self._folder.glob("*.jsonl")):
            try:
                tokens = count_left(left)
            except (OSError, DatabaseError) as error:  # the others are counted all the same
                log.warning("a journal is not counted yet", path=str(left), cause=str(error))
                continue
            if files is not None and left == files.path:  # filled, and changed above
                with self._lock:
                    self._counted.update(tokens)


class _Files:
    """A journal and its open answers; a lock on the journal says that its gateway lives."""

    def __init__(self, path: Path, file: int) -> None:
        self.path, self._file = path, file
        self.num_bytes = self.num_counted = 0
        opened = os.open(path.with_suffix(OPEN), FLAGS, 0o600)
        try:
            os.posix_fallocate(opened, 0, NUM_SLOTS * SLOT_BYTES)  # a full disk is met here
            self._slots = mmap.mmap(opened, NUM_SLOTS * SLOT_BYTES)
        finally:
            os.close(opened)

    @classmethod
    def made(cls, path: Path) -> "_Files | None":
        """Return new files; None if somebody took the journal for one that is left, and has it.

        Raises:
            OSError: the disk is full.
        """
        file = os.open(path, FLAGS | os.O_APPEND, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file), path.stat()):
                return cls(path, file)
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError:
            os.close(file)
            raise
        os.close(file)
        return None

    def append(self, line: bytes) -> None:
        """Write a line whole or not at all.

        Raises:
            OSError: the disk is full.
        """
        if (written := os.write(self._file, line)) < len(line):
            os.ftruncate(self._file, self.num_bytes)
            raise OSError(f"{written} of {len(line)} bytes were written")
        self.num_bytes += len(line)

    def write_slot(self, slot: int, line: bytes) -> None:
        begin = slot * SLOT_BYTES
        self._slots[begin : begin + SLOT_BYTES] = line.ljust(SLOT_BYTES, b"\0")

    def close(self) -> None:
        self._slots.close()
        os.close(self._file)


def open_answers(path: Path) -> list[Answer]:
    """Return the answers that were open when the gateway of a journal died."""
    try:
        slots = path.with_suffix(OPEN).read_bytes()
    except FileNotFoundError:
        return []
    lines = (slots[at : at + SLOT_BYTES].rstrip(b"\0") for at in range(0, len(slots), SLOT_BYTES))
    return read_answers(filter(None, lines))


def count_left(path: Path) -> Tokens:
    """Count a journal whose gateway is dead, with its open answers, and delete it.

    Nothing is done while its gateway lives, or while another one counts it.
    """
    with suppress(FileNotFoundError), path.open("r+b") as file:  # NFS locks what is writable
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Counter()
        tokens = count_file(path, is_left=True)
        path.with_suffix(OPEN).unlink(missing_ok=True)
        path.unlink()
        UsageJournal.objects.filter(pk=path.stem).delete()
        return tokens
    return Counter()


def read_answers(lines: Iterable[bytes]) -> list[Answer]:
    """Return the answers of lines; one that is none is logged and left out."""
    found = []
    for line in lines:
        try:
            found.append(read_answer(line))
        except (ValueError, TypeError):  # its gateway died while it wrote
            log.warning("a line of a journal is no answer", line=line[:200])
    return found


def count_file(path: Path, *, is_left: bool = False) -> Tokens:
    """Count the answers of a journal that are not counted yet; return their tokens.

    ``is_left``: its gateway is dead, so that its open answers have ended too.
    """
    with transaction.atomic():
        UsageJournal.objects.get_or_create(pk=path.stem)
        row = UsageJournal.objects.select_for_update().get(pk=path.stem)
        whole = path.read_bytes()
        whole = whole[: whole.rfind(b"\n") + 1]
        new = whole[row.counted_bytes :]
        answers = read_answers(new.splitlines())
        if is_left and row.has_open:
            ended = {each.id for each in read_answers(whole.splitlines())}
            answers += [each for each in open_answers(path) if each.id not in ended]
        if not answers and not is_left:
            return Counter()
        _store(answers)
        fenced = UsageJournal.objects.filter(
            pk=row.pk, counted_bytes=row.counted_bytes, has_open=row.has_open
        )
        if not fenced.update(counted_bytes=len(whole), has_open=not is_left):
            transaction.set_rollback(True)  # another process counted it meanwhile
            return Counter()
    return tokens_by_period(answers)


def tokens_by_period(answers: Iterable[Answer]) -> Tokens:
    """Return the tokens of answers, each in its day and in its month."""
    tokens: Tokens = Counter()
    for each in answers:
        for period in periods_of(each.day):
            tokens[each.key_id, period] += each.num_tokens
    return tokens


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
