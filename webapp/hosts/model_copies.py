"""Copies of models over the site: from another host's cache, or a person's folder, to a host.

The source sends its files in parts, the site holds each until the receiving host has fetched and
verified it. So the site's disk needs room for some files, not for the model, and every step goes
on where it stopped. Hosts need no connection to each other.
"""

import fcntl
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Protocol

from django.conf import settings
from django.db import transaction
from django.db.models import Q

from planner.specs.units import GIB
from runners.datasets.repositories import DATA_SETS
from runners.hub.repository import is_safe_path
from runners.shared.messages import CopiedFile, CopyFile, CopyOrder, CopyState
from webapp.audit.models import event_record
from webapp.core.clock import now
from webapp.core.display import listed
from webapp.core.problems import (
    BusyProblem,
    ConflictProblem,
    InvalidProblem,
    NotFoundProblem,
    TooLargeProblem,
)
from webapp.hosts.models import RUNS_JOBS, Host, HostModel, HostState, ModelCopy
from webapp.hosts.services import publish_host_checks

MAX_PART_BYTES = 16 * 1024**2
PIECE_BYTES = 1024**2
MARGIN_BYTES = 4 * GIB  # of the site's disk, which files on their way leave free
PARTIAL_SUFFIX = ".part"
ROOM_SECONDS = 10.0  # until a source that found no room asks again
ROOM_LIFETIME = timedelta(minutes=10)  # for which a file begun keeps the room of its rest
LIFETIME = timedelta(days=7)  # of a copy that nothing moves
LEAST_COMMIT = 7  # digits by which people name one


class Readable(Protocol):
    """A source of bytes that is read in pieces."""

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes; empty at the end."""


class Held(NamedTuple):
    """One file of a copy, and where the site holds it."""

    copy: ModelCopy
    number: int
    file: CopyFile
    path: Path

    @property
    def partial(self) -> Path:
        """The file while a part of it lacks."""
        return _partial(self.path)


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL_SUFFIX)


# What people begin and end


def copy_from_host(*, host: Host, source: Host, name: str, by: str) -> ModelCopy:
    """Begin to copy a model of another host's cache, or return the copy that is under way.

    ``name``: org/name, or org/name@commit.

    Raises:
        NotFoundProblem: the source's cache has none of that name, or not all of it.
        InvalidProblem: the host has no cache, or is the source.
        ConflictProblem: the host has it, or another source sends it already.
    """
    _check_ends(host, source)
    repository, _, commit = name.strip().partition("@")
    rows = source.models.filter(repository=repository, is_complete=True)
    found = list(rows.filter(commit__startswith=commit).order_by("-used_at", "commit"))
    if not found or repository.startswith(DATA_SETS) or 0 < len(commit) < LEAST_COMMIT:
        has = rows_of(source)[:5]
        raise NotFoundProblem(
            "model",
            f"The cache of {source.name} has no whole model {name[:80]!r}: it has "
            f"{listed(has) or 'none'}. Name one as org/name, or as org/name@commit with at least "
            f"{LEAST_COMMIT} digits of the commit; data sets are not copied.",
        )
    return _begin(host, source, found[0].repository, found[0].commit, (), "", by)


def rows_of(source: Host) -> list[str]:
    """Return the repositories of whole models in a host's cache."""
    rows = source.models.filter(is_complete=True).exclude(repository__startswith=DATA_SETS)
    return sorted(set(rows.values_list("repository", flat=True)))


def copy_from_folder(
    *, host: Host, repository: str, commit: str, revision: str, files: Sequence[CopyFile], by: str
) -> ModelCopy:
    """Begin to copy a person's files, or return the copy of the same files that is under way.

    Raises:
        InvalidProblem: the host has no cache, a file no path below its folder, or the server's
            disk no room for one.
        ConflictProblem: the host has the model, or another source sends it already.
    """
    _check_ends(host, None)
    if words := _too_large(files):
        raise InvalidProblem("files", words)
    return _begin(host, None, repository, commit, files, revision, by)


def _check_ends(host: Host, source: Host | None) -> None:
    for each in filter(None, (host, source)):
        if each.kind not in RUNS_JOBS or each.state in {HostState.PENDING, HostState.RETIRED}:
            raise InvalidProblem(
                "host",
                f"{each.name} has no agent that could carry a copy out: name a host that is "
                "enrolled.",
            )
    if source == host:
        raise InvalidProblem("source", f"{host.name} cannot be its own source: name another host.")


def _begin(
    host: Host,
    source: Host | None,
    repository: str,
    commit: str,
    files: Sequence[CopyFile],
    revision: str,
    by: str,
) -> ModelCopy:
    stored = _documents(files)
    if host.models.filter(repository=repository, commit=commit, is_complete=True).exists():
        raise ConflictProblem(
            "model_there", f"{host.name} has {repository} at {commit[:12]} already."
        )
    with transaction.atomic():
        copy, is_new = ModelCopy.objects.get_or_create(
            host=host,
            repository=repository,
            commit=commit,
            state=ModelCopy.State.ACTIVE,
            defaults={
                "source": source,
                "files": stored,
                "revision": revision,
                "asked_by": by[:150],
            },
        )
        if is_new:
            sender = source.name if source else "a folder"
            event_record(host, "host.copy_begun", by, detail={"model": str(copy), "from": sender})
    if not is_new and (copy.source != source or (source is None and copy.files != stored)):
        raise ConflictProblem(
            "copy_active",
            f"{repository} at {commit[:12]} is being copied to {host.name} from "
            f"{copy.source.name if copy.source else 'a folder'}, asked for by {copy.asked_by}: "
            "wait for its end, or stop it first.",
        )
    publish_host_checks(host)
    return copy


def _too_large(files: Iterable[CopyFile]) -> str:
    """Return why the server's disk never holds the largest of some files, "" if it may."""
    total = shutil.disk_usage(_copies_dir()).total
    largest = max(files, key=lambda each: each.size_bytes, default=None)
    if largest is None or largest.size_bytes <= total - MARGIN_BYTES:
        return ""
    return (
        f"{largest.path} has {largest.size_bytes / GIB:.1f} GiB, and the server's disk for files "
        f"on their way {total / GIB:.1f} in all, of which {MARGIN_BYTES / GIB:g} stay free. "
        "Download the model on the host, or give the server's data folder a larger disk."
    )


def _documents(files: Sequence[CopyFile]) -> list[dict[str, object]]:
    known: set[str] = set()
    for each in files:
        if not is_safe_path(each.path) or each.path in known:
            raise InvalidProblem(
                "files",
                f"files has the path {each.path[:80]!r}, which is none below a model's folder, or "
                "stands twice. Rename the file.",
            )
        known.add(each.path)
    return [each.model_dump(mode="json") for each in files]


def copy_stop(*, copy: ModelCopy, by: str) -> ModelCopy:
    """Stop a copy; what the host has received stays there for the next one."""
    return _end(copy, ModelCopy.State.STOPPED, f"Stopped by {by}.", by)


def copies_expire() -> int:
    """End the copies that cannot go on, and delete what no copy needs; return their number.

    They are those that nothing has moved for a week, and those of a retired host.
    """
    active = ModelCopy.objects.filter(state=ModelCopy.State.ACTIVE).select_related(
        "host", "source"
    )
    ended = 0
    for each in active:
        retired = [
            host.name
            for host in (each.host, each.source)
            if host and host.state == HostState.RETIRED
        ]
        words = f"{listed(retired)} was retired." if retired else ""
        if not words and each.moved_at < now() - LIFETIME:
            words = f"Nothing moved for {LIFETIME.days} days. Copy the model again."
        if words:
            _end(each, ModelCopy.State.FAILED, words, "system:copies")
            ended += 1
    _sweep()
    return ended


def _sweep() -> None:
    """Delete the folders of copies that are not active; a copy's row is older than its folder."""
    folders = [each for each in _copies_dir().iterdir() if each.is_dir()]
    active = ModelCopy.objects.filter(state=ModelCopy.State.ACTIVE)
    kept = set(active.values_list("pk", flat=True))
    for folder in folders:
        if folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def _end(copy: ModelCopy, state: str, problem: str, by: str) -> ModelCopy:
    with transaction.atomic():
        rows = ModelCopy.objects.filter(pk=copy.pk, state=ModelCopy.State.ACTIVE)
        if rows.update(state=state, problem=problem, ended_at=now()):
            detail = {"model": str(copy), "problem": problem}
            event_record(copy.host, f"host.copy_{state}", by, detail=detail)
    shutil.rmtree(_folder(copy), ignore_errors=True)
    publish_host_checks(copy.host)
    copy.refresh_from_db()
    return copy


# What the ends of a copy do


def orders_of(hosts: Collection[str]) -> dict[str, tuple[CopyOrder, ...]]:
    """Return by host the copies in which it takes part: one query."""
    found: dict[str, list[CopyOrder]] = {}
    rows = ModelCopy.objects.filter(state=ModelCopy.State.ACTIVE).order_by("created_at")
    columns = ("pk", "host", "source", "repository", "commit", "revision")
    for pk, host, source, repository, commit, revision in rows.values_list(*columns):
        for each, part in ((source, "send"), (host, "receive")):
            if each in hosts:
                order = CopyOrder.model_validate(
                    {
                        "copy_id": pk, "part": part, "repository": repository, "commit": commit,
                        "revision": revision,
                    }
                )  # fmt: skip
                found.setdefault(each, []).append(order)
    return {host: tuple(orders) for host, orders in found.items()}


def copy_of(host: Host, copy_id: str, *, sends: bool | None = None) -> ModelCopy:
    """Return a copy in which a host takes part.

    Raises:
        NotFoundProblem: there is none, or the host has the other part in it.
    """
    copy = ModelCopy.objects.select_related("host", "source").filter(pk=copy_id).first()
    parts = {True: copy.source_id, False: copy.host_id} if copy else {}
    asked = parts.values() if sends is None else [parts.get(sends)]
    if copy is None or host.pk not in asked:
        raise NotFoundProblem("no_copy", "This host has no such part in a copy of this id.")
    return copy


def files_announce(*, copy: ModelCopy, files: Sequence[CopyFile], revision: str) -> ModelCopy:
    """Store what a host sends; said again after a restart it changes nothing.

    A copy with a file that the server's disk never holds is ended.
    """
    documents = _documents(files)
    if words := _too_large(files):
        return _end(copy, ModelCopy.State.FAILED, words, "system:copies")
    rows = ModelCopy.objects.filter(pk=copy.pk, state=ModelCopy.State.ACTIVE, files=[])
    rows.update(files=documents, revision=revision, moved_at=now())
    copy.refresh_from_db()
    return copy


def state_of(copy: ModelCopy) -> CopyState:
    """Return how far a copy is, file by file."""
    there, is_active = set(copy.there), copy.state == ModelCopy.State.ACTIVE
    return CopyState(
        is_active=is_active,
        files=tuple(
            CopiedFile(
                **document,
                received_bytes=_received(_held(copy, number))
                if is_active and number not in there
                else 0,
                is_there=number in there,
            )
            for number, document in enumerate(copy.files)
        ),
    )


def _copies_dir() -> Path:
    folder = Path(settings.COPIES_DIR)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _folder(copy: ModelCopy) -> Path:
    return Path(settings.COPIES_DIR) / copy.pk


def _held(copy: ModelCopy, number: int) -> Held:
    if not 0 <= number < len(copy.files):
        raise NotFoundProblem("no_file", f"The copy has {len(copy.files)} files, from number 0.")
    file = CopyFile.model_validate(copy.files[number])
    return Held(copy, number, file, _folder(copy) / str(number))


def _received(held: Held) -> int:
    """Return the bytes of a file that are there; give a whole one its name.

    A process that ended after the last byte, and before the name, has left that undone.
    """
    if _size(held.partial) == held.file.size_bytes:
        with suppress(ConflictProblem), _locked(held) as handle:
            _name_if_whole(held, handle)
    if held.path.is_file():
        return held.file.size_bytes
    return _usable(_size(held.partial) or 0, held)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _usable(size: int, held: Held) -> int:
    """Return how much of a partial file counts: none of one that is longer than the file."""
    return size if size <= held.file.size_bytes else 0


@contextmanager
def _locked(held: Held) -> Iterator[int]:
    """Open the partial file, which no other call writes meanwhile.

    Raises:
        ConflictProblem: the copy has ended, and its folder is gone.
    """
    while True:
        try:
            handle = os.open(held.partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise ConflictProblem("copy_ended", f"The copy of {held.copy} has ended.") from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            try:
                is_same = os.path.samestat(os.fstat(handle), held.partial.stat())
            except FileNotFoundError:  # it got its name, or was deleted, before the lock came
                is_same = False
            if is_same:
                yield handle
                return
        finally:
            os.close(handle)


def _name_if_whole(held: Held, handle: int) -> bool:
    """Give the locked partial file its name if nothing of it lacks; return whether it has it."""
    if held.path.is_file():
        held.partial.unlink()
    elif os.fstat(handle).st_size == held.file.size_bytes:
        held.partial.replace(held.path)
    return held.path.is_file()


def part_write(*, copy: ModelCopy, number: int, offset: int, body: Readable) -> int:
    """Append a part of a file; return the bytes that the site then holds of it.

    A part with another offset changes nothing; the returned number is where to go on. The host
    that receives the file verifies it.

    Raises:
        ConflictProblem: the copy has ended.
        BusyProblem: the site's disk has no room until the host has taken what is there.
        TooLargeProblem: the part is longer than a part, or than the rest of the file.
    """
    _check_active(copy)
    held = _held(copy, number)
    if number in copy.there:
        return held.file.size_bytes
    have = _received(held)
    if offset != have or held.path.is_file():
        return have
    held.path.parent.mkdir(parents=True, exist_ok=True)
    _check_room(held, have)
    with _locked(held) as handle:
        if held.path.is_file():
            held.partial.unlink()
            return held.file.size_bytes
        size = os.fstat(handle).st_size
        if offset != (have := _usable(size, held)):  # another call was faster
            return have
        if size > have:
            os.ftruncate(handle, have)
        have += _append(held, handle, have, body)
        _name_if_whole(held, handle)
    ModelCopy.objects.filter(pk=copy.pk).update(moved_at=now())
    return have


def _check_active(copy: ModelCopy) -> None:
    if copy.state != ModelCopy.State.ACTIVE:
        raise ConflictProblem(
            "copy_ended", f"The copy of {copy} has ended. {copy.problem}".strip()
        )


def _check_room(held: Held, have: int) -> None:
    promised = _promised_bytes(held)
    free = shutil.disk_usage(held.path.parent).free - promised
    needed = held.file.size_bytes - have + MARGIN_BYTES
    if free < needed:
        others = f" besides {promised / GIB:.1f} for files that came before" if promised else ""
        raise BusyProblem(
            "copy_waits",
            f"The server's disk has {max(0, free) / GIB:.1f} GiB free{others}, and "
            f"{held.file.path} needs {needed / GIB:.1f} with {MARGIN_BYTES / GIB:g} that stay "
            f"free: it is sent when {held.copy.host.name} has taken the files before it, or room "
            "was made.",
            retry_after_seconds=ROOM_SECONDS,
        )


def _promised_bytes(held: Held) -> int:
    """Return what lacks of the files that copies begun earlier are sending.

    The order is one for all copies, so that of two that lack room one goes on and no two wait for
    each other. A copy that has stood still for a while keeps no room.
    """
    copy, found = held.copy, 0
    earlier = ModelCopy.objects.filter(
        Q(created_at__lt=copy.created_at) | Q(created_at=copy.created_at, pk__lt=copy.pk),
        state=ModelCopy.State.ACTIVE,
        moved_at__gt=now() - ROOM_LIFETIME,
    )
    for other in earlier.only("pk", "files"):
        for number, document in enumerate(other.files):
            size = _size(_partial(_folder(other) / str(number)))
            found += 0 if size is None else max(0, document["size_bytes"] - size)
    return found


def _append(held: Held, handle: int, offset: int, body: Readable) -> int:
    limit, written = min(MAX_PART_BYTES, held.file.size_bytes - offset), 0
    while piece := memoryview(body.read(PIECE_BYTES)):
        if written + len(piece) > limit:
            os.ftruncate(handle, offset)
            raise TooLargeProblem(
                "part_too_large",
                f"The part is longer than {limit} bytes, the limit at byte {offset}.",
            )
        while piece:
            count = os.pwrite(handle, piece, offset + written)
            piece, written = piece[count:], written + count
    return written


def file_at(copy: ModelCopy, path: str) -> Path:
    """Return where the site holds a file of a copy.

    Raises:
        NotFoundProblem: the copy has no such file, or not all of it has come.
    """
    for number, document in enumerate(copy.files):
        if document["path"] == path and (held := _held(copy, number)).path.is_file():
            return held.path
    raise NotFoundProblem("no_file", f"The site does not hold {path[:80]!r} of this copy.")


def file_take(*, copy: ModelCopy, number: int, is_right: bool) -> ModelCopy:
    """Record that the host has verified a file, and delete the site's own.

    ``is_right``: its digest is; otherwise, or where the host has lost the file since, the source
    sends it again.

    Raises:
        NotFoundProblem: the copy has no file of this number.
    """
    held = _held(copy, number)
    with transaction.atomic():
        row = ModelCopy.objects.select_for_update().get(pk=copy.pk)
        there = {*row.there, number} if is_right else {*row.there} - {number}
        if is_right or number in row.there:
            row.there, row.moved_at = sorted(there), now()
            row.save(update_fields=["there", "moved_at"])
    for path in (held.path, held.partial):
        path.unlink(missing_ok=True)
    publish_host_checks(copy.host)
    copy.refresh_from_db()
    return copy


def copy_end(*, copy: ModelCopy, host: Host, problem: str) -> ModelCopy:
    """End a copy: the host has all files under their names, or one of both cannot go on."""
    if problem:
        words = problem if problem.startswith(host.name) else f"{host.name}: {problem}"
        return _end(copy, ModelCopy.State.FAILED, words, f"host:{host.slug}")
    return _end(copy, ModelCopy.State.DONE, "", f"host:{host.slug}")


# What a host's page and lists show


def copies_to(host: Host, at_most: int | None = None) -> list[ModelCopy]:
    """Return the copies to a host, the newest first."""
    rows = ModelCopy.objects.filter(host=host).select_related("host", "source")
    return list(rows.order_by("-created_at")[:at_most])


def copyable_to(host: Host, hosts: Iterable[Host]) -> list[HostModel]:
    """Return the whole models on other hosts that a host lacks, by name: two queries."""
    others = [each.pk for each in hosts if each.pk != host.pk]
    own = set(host.models.filter(is_complete=True).values_list("repository", "commit"))
    rows = HostModel.objects.filter(host__in=others, is_complete=True).select_related("host")
    rows = rows.exclude(repository__startswith=DATA_SETS).order_by("repository", "commit")
    found: dict[tuple[str, str], HostModel] = {}
    for row in rows:
        if (row.repository, row.commit) not in own:
            found.setdefault((row.repository, row.commit), row)
    return list(found.values())
