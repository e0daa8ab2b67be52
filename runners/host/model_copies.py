"""Copies of models over the site: this host sends files of its Hub's cache, or receives some.

The server repeats an order until the copy has ended, so that every step may fail, and goes on at
the next one. Received files are fetched from the server as from the Hub: by ranges, resumed, each
digest verified before the file has its name, under the locks that downloads of jobs take.
"""

import logging
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from runners.host.shipping import API, RefusedError, ServerClient, ServerError
from runners.hub.download import fetch_blobs
from runners.hub.errors import DownloadStoppedError, HubError
from runners.hub.folders import folder_listing
from runners.hub.links import SITE, Bandwidth, of_host
from runners.hub.listing import HubFile, Listing
from runners.hub.selection import readable_files
from runners.hub.settings import HubSettings, HubSettingsError, existing_folder, from_environment
from runners.hub.store import (
    has_blob,
    link_files,
    mark_copied,
    repository_folder,
    revision_of,
    snapshot_folder,
)
from runners.jobspec.base import LONGEST_REVISION, REVISION
from runners.launchers import launch
from runners.launchers.model_uses import COPIES_FILE
from runners.shared.config import HostConfigError, HostDir
from runners.shared.messages import CopiedFile, CopyFile, CopyFiles, CopyOrder, CopyState
from runners.shared.timing import scale_duration
from runners.supervision import child

PART_BYTES = 8 * 2**20
IDLE_SECONDS = 3600.0  # without an order
WAIT_SECONDS = scale_duration(2.0, least=0.1)  # until the other end may have done more
RETRY_SECONDS = scale_duration(10.0, least=0.2)
MOST_WRONG = 2  # arrivals of one file with a wrong digest
SHA256_DIGITS = 64

log = logging.getLogger(__name__)


class CopyError(Exception):
    """A copy cannot go on; the message says why and what to do."""


class ModelCopies:
    """The copies in which one host takes part; ``step`` runs in a thread of its own."""

    def __init__(self, host_dir: HostDir, client: ServerClient, credential: str) -> None:
        self._host_dir = host_dir
        self._client = client
        self._credential = credential
        self._orders: tuple[CopyOrder, ...] = ()
        self._noted: list[str] | None = None  # what the file says; None: of an earlier process
        self._wrong: dict[tuple[str, int], int] = {}  # arrivals by copy and file
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._problem = ""

    @property
    def problems(self) -> tuple[str, ...]:
        """Return why copies wait, one sentence each."""
        return (self._problem,) if self._problem else ()

    def use(self, credential: str) -> None:
        """Use another credential from now on."""
        self._credential = credential

    def obey(self, orders: Sequence[CopyOrder]) -> bool:
        """Take the orders for the next step; return whether they are new."""
        with self._lock:
            is_new = tuple(orders) != self._orders
            self._orders = tuple(orders)
            copied = sorted({each.repository for each in orders})
            if copied != self._noted:  # what is copied is neither pruned nor deleted meanwhile
                child.write_json(self._host_dir.path / COPIES_FILE, {"copied": copied})
                self._noted = copied
        return is_new

    def stop(self) -> None:
        """End the present step soon; what arrived is kept."""
        self._stopped.set()

    def step(self) -> float:
        """Do what can be done for each copy; return the seconds until the next step."""
        orders = self._orders
        self._wrong = {
            key: count
            for key, count in self._wrong.items()
            if key[0] in {each.copy_id for each in orders}
        }
        pause, self._problem = IDLE_SECONDS, ""
        for order in orders:
            pause = min(pause, self._advance(order))
        return pause

    def _advance(self, order: CopyOrder) -> float:
        try:
            self._carry_out(order)
        except DownloadStoppedError:
            return WAIT_SECONDS
        except (ServerError, HubError, OSError) as error:
            if isinstance(error, RefusedError) and error.code == "copy_waits":
                return error.retry_after_seconds or RETRY_SECONDS
            self._problem = f"The copy of {order.repository} waits: {error}"[:300]
            log.info("the copy of %s waits: %s", order.repository, error)
            return RETRY_SECONDS
        except Exception as error:  # the other copies go on
            self._problem = f"The copy of {order.repository} waits: {error!r}"[:300]
            log.exception("the copy of %s waits", order.repository)
            return RETRY_SECONDS
        return WAIT_SECONDS

    def _carry_out(self, order: CopyOrder) -> None:
        """Do this host's part in a copy, or end the copy with the reason why it cannot."""
        try:
            (self._send if order.part == "send" else self._receive)(order)
        except (CopyError, HubSettingsError, HostConfigError) as error:
            self._client.end_copy(order.copy_id, str(error)[:1000])

    def _is_withdrawn(self, order: CopyOrder) -> bool:
        return self._stopped.is_set() or order not in self._orders

    def _settings(self) -> HubSettings:
        env = launch.render_env(self._host_dir.path, 1) | launch.hub_env()
        return of_host(from_environment(env), self._host_dir.path)

    # Sending

    def _send(self, order: CopyOrder) -> None:
        """Send the parts that the server lacks, until it has no room or all are there.

        Raises:
            CopyError: the model is no longer here.
        """
        settings = self._settings()
        state = self._client.copy_state(order.copy_id)
        if not state.is_active:
            return
        folder = snapshot_folder(settings, order.repository, order.commit)
        if not state.files:
            state = self._client.announce_copy(order.copy_id, _announced(order, folder, settings))
        bandwidth = Bandwidth(settings)
        for number, file in enumerate(state.files):
            for offset, data in self._parts(order, folder, file):
                for seconds in bandwidth.delays(len(data)):
                    self._stopped.wait(seconds)
                received = self._client.send_copy_part(order.copy_id, number, offset, data)
                if received != offset + len(data):
                    return  # begun anew, or by another one: the next step asks

    def _parts(
        self, order: CopyOrder, folder: Path, file: CopiedFile
    ) -> Iterator[tuple[int, bytes]]:
        if file.is_there or (file.received_bytes == file.size_bytes and file.size_bytes):
            return
        try:
            with (folder / file.path).open("rb") as source:
                offset = file.received_bytes
                source.seek(offset)
                while not self._is_withdrawn(order):
                    data = source.read(min(PART_BYTES, file.size_bytes - offset))
                    if not data and file.size_bytes:
                        break
                    yield offset, data
                    offset += len(data)
                    if offset >= file.size_bytes:
                        return
        except FileNotFoundError:
            raise CopyError(_gone(order)) from None
        if not self._is_withdrawn(order):
            raise CopyError(_gone(order))

    # Receiving

    def _receive(self, order: CopyOrder) -> None:
        """Fetch the files that the server holds; with the last one the model has its names.

        Raises:
            CopyError: the disk is too small, or a file came with a wrong digest again.
            HubError: the server does not answer.
            DownloadStoppedError: the order was withdrawn; what arrived is kept.
        """
        state = self._client.copy_state(order.copy_id)
        if not state.is_active or not state.files:
            return
        server = f"{self._client.server}{API}/copies/{order.copy_id}/hub"
        settings = replace(
            self._settings(),
            endpoint=server,
            token=self._credential,
            is_offline=False,
            link=SITE,
        )
        listing = _listing(order, state)
        self._check_room(listing, settings)
        for number, file in enumerate(listing.files):
            known = state.files[number]
            if has_blob(settings, listing, file):
                if not known.is_there:
                    self._client.take_copied(order.copy_id, number, is_right=True)
            elif known.is_there:  # it was, and is lost: the source sends it again
                self._client.take_copied(order.copy_id, number, is_right=False)
                return
            elif known.received_bytes == known.size_bytes:
                self._fetch(order, number, listing, settings)
            else:
                return  # its turn has not come
        link_files(settings, listing, listing.files)
        mark_copied(settings, listing)
        self._client.end_copy(order.copy_id)
        log.info("%s@%s was copied to this host", order.repository, order.commit[:12])

    def _fetch(
        self, order: CopyOrder, number: int, listing: Listing, settings: HubSettings
    ) -> None:
        file = listing.files[number]
        try:
            fetch_blobs(listing, [file], settings, should_stop=lambda: self._is_withdrawn(order))
        except HubError as error:
            if error.kind == "disk_full":
                raise CopyError(str(error)) from None
            if error.kind != "wrong_digest":
                raise
            wrong = self._wrong[order.copy_id, number] = (
                self._wrong.get((order.copy_id, number), 0) + 1
            )
            if wrong >= MOST_WRONG:
                raise CopyError(
                    f"{file.path} arrived {wrong} times with another digest than its source "
                    "states: its file there is damaged; delete the model there, download it "
                    "again and copy it then"
                ) from None
            self._client.take_copied(order.copy_id, number, is_right=False)
            raise
        self._client.take_copied(order.copy_id, number, is_right=True)

    def _check_room(self, listing: Listing, settings: HubSettings) -> None:
        lacking = sum(file.size for file in listing.files if not has_blob(settings, listing, file))
        free = shutil.disk_usage(existing_folder(settings.cache)).free
        arrived = _unfinished_bytes(settings, listing.repository)
        if lacking and free + arrived < lacking + settings.margin_bytes:
            raise CopyError(
                f"the disk of {settings.cache} has {free / 2**30:.1f} GiB free, and the model "
                f"needs {lacking / 2**30:.1f} GiB besides {settings.margin_bytes / 2**30:.1f} "
                "that stay free: delete models that are not used, or set HF_HOME on the host to "
                "a larger disk"
            )


def _unfinished_bytes(settings: HubSettings, repository: str) -> int:
    found = 0
    for path in (repository_folder(settings, repository) / "blobs").glob("*.incomplete"):
        with suppress(OSError):
            found += path.stat().st_blocks * 512
    return found


def _gone(order: CopyOrder) -> str:
    return (
        f"{order.repository} at {order.commit[:12]} is not, or no longer whole, in the cache of "
        "this host: copy it from another one"
    )


def _announced(order: CopyOrder, folder: Path, settings: HubSettings) -> CopyFiles:
    """Return the files of a snapshot that jobs read, and the branch that stands for it."""
    files = readable_files(folder_listing(folder, order.repository, order.commit))
    if not files:
        raise CopyError(_gone(order))
    revision = revision_of(order.repository, order.commit, settings)
    is_named = len(revision) <= LONGEST_REVISION and re.fullmatch(REVISION, revision)
    return CopyFiles(
        revision=revision if is_named else "",  # git allows names that jobs cannot state
        files=tuple(
            CopyFile(path=each.path, size_bytes=each.size, etag=each.etag) for each in files
        ),
    )


def _listing(order: CopyOrder, state: CopyState) -> Listing:
    """Return a copy's files as the Hub lists them."""
    files = tuple(
        HubFile(
            each.path,
            each.size_bytes,
            each.etag,
            each.etag if len(each.etag) == SHA256_DIGITS else "",
        )
        for each in state.files
    )
    return Listing(order.repository, order.commit, files, revision=order.revision)
