"""Fetches the files of a repository into the Hub's cache: by ranges, resumed, verified, shared.

huggingface_hub 2.4 begins a file anew in a second call. Here what arrived is kept, whatever ends
the process; every digest is checked before a file has its name; processes that want the same file
fetch it once. Plain bytes of the address that the Hub redirects to: xet's protocol is not used.
"""

import asyncio
import errno
import os
import shutil
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urljoin

import httpx

from runners.hub.errors import (
    DownloadStoppedError,
    HubError,
    refusal,
    unreachable,
    unusual,
    wait_seconds,
)
from runners.hub.links import Bandwidth, note_transfer
from runners.hub.listing import (
    BY_ITSELF,
    ETAG,
    MAX_REDIRECTS,
    REDIRECTS,
    HubFile,
    Listing,
    file_url,
    new_digest,
)
from runners.hub.partial import Partial, Segment, arrived, lock_path, locked
from runners.hub.settings import HubSettings
from runners.hub.store import blob_path, has_blob, link_files, missing, repository_folder

Progress = Callable[[int, int, float], None]  # bytes done, bytes in all, bytes per second

POLL_SECONDS = 0.2  # of should_stop, and of a lock that another process holds
REPORT_SECONDS = 0.5
RATE_SECONDS = 10.0  # over which the rate is measured
SPACE_SECONDS = 2.0
CONNECT_SECONDS, READ_SECONDS = 15.0, 30.0
MAX_FAILURES = 8  # requests one after the other that bring nothing: one minute
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
MAX_WAITED_SECONDS = 3600.0  # for rate limits, in all
TRIES = 2  # of a file whose digest is wrong
MIB = 2**20
SHORT_BYTES = 2**16
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
EXPIRED = {400, 401, 403, 404, 410}  # of an address that the Hub signed for a while
AGAIN = {408, 425, 500, 502, 503, 504}


def download(
    listing: Listing,
    files: Sequence[HubFile],
    settings: HubSettings,
    *,
    on_progress: Progress = lambda _done, _total, _rate: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Path:
    """Fetch the files that are not there, and return the folder of the snapshot, then complete.

    Both callbacks are called in this thread, in which no event loop may run: ``should_stop`` five
    times a second, ``on_progress`` twice.

    Raises:
        DownloadStoppedError: ``should_stop`` returned true; what arrived is kept.
        HubError: any kind of a request, disk_full, cache, wrong_digest or truncated.
    """
    fetch_blobs(listing, files, settings, on_progress=on_progress, should_stop=should_stop)
    with _disk_errors(settings):
        return link_files(settings, listing, files)


def fetch_blobs(
    listing: Listing,
    files: Sequence[HubFile],
    settings: HubSettings,
    *,
    on_progress: Progress = lambda _done, _total, _rate: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Fetch the files that are not there; ``link_files`` gives them their names.

    Raises:
        DownloadStoppedError, HubError: as ``download``.
    """
    total = sum({file.etag: file.size for file in files}.values())
    wanted = missing(listing, files, settings)
    if wanted:
        if settings.is_offline:
            raise HubError(
                "offline",
                f"{listing.shown()} lacks {len(wanted)} files here, "
                "and HF_HUB_OFFLINE is set on the host: unset it, or use a model that is there",
            )
        _run(_Download(listing, wanted, settings, total).run(on_progress, should_stop))
    on_progress(total, total, 0.0)


def _run(work: Coroutine[object, object, None]) -> None:
    """Run to the end, or to the first error.

    Unlike ``asyncio.run`` it does not wait for threads: a name server may take minutes.
    """
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(work)
    except BaseExceptionGroup as group:
        raise _first(group) from None
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _first(error: BaseException) -> BaseException:
    """Return the first error of nested groups, one of ours before others."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    errors = [_first(each) for each in error.exceptions]
    ours = (each for each in errors if isinstance(each, HubError | DownloadStoppedError))
    return next(ours, errors[0])


@contextmanager
def _disk_errors(settings: HubSettings) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise HubError(
                "disk_full",
                f"the disk of {settings.cache} is full: delete models that are not used, or set "
                "HF_HOME on the host to a folder of a larger disk; what arrived is kept",
            ) from None
        raise HubError(
            "cache",
            f"{settings.cache} cannot be written ({error.strerror}): give it to the user of the "
            "host's agent, or set HF_HOME on the host to a folder that is",
        ) from None


class _NoRangesError(Exception):
    """A server sends the whole file whatever range is requested."""


class _AgainError(Exception):
    """A request brought less than was asked for; ``error`` is raised if that goes on."""

    def __init__(self, error: HubError, wait: float = 0.0) -> None:
        super().__init__()
        self.error = error
        self.wait = wait  # seconds that the server asks for


class _Received:
    """What has come over the network, and in which time: of that the link's rate is measured."""

    def __init__(self) -> None:
        self.bytes = 0
        self._began_at = self._ended_at = time.monotonic()

    def add(self, num_bytes: int) -> None:
        self._ended_at = time.monotonic()
        if not self.bytes:  # the first bytes begin the time, and are not of it
            self._began_at, self.bytes = self._ended_at, 1
            return
        self.bytes += num_bytes

    @property
    def seconds(self) -> float:
        return self._ended_at - self._began_at


@dataclass
class _Source:
    """Where a file comes from: the Hub, and for a while the address that it redirects to."""

    file: HubFile
    url: str
    requested: str  # in words
    location: str = ""
    has_ranges: bool = True


class _Download:
    """One call of ``download``: its connections, and what has arrived."""

    def __init__(
        self, listing: Listing, wanted: Sequence[HubFile], settings: HubSettings, total: int
    ) -> None:
        self.listing = listing
        self.wanted = wanted
        self.settings = settings
        self.total = total
        self.folder = repository_folder(settings, listing.repository)
        self.arrived = {file.etag: arrived(self._blob(file), file.size) for file in wanted}
        self.there = total - sum(file.size for file in wanted)
        self.bandwidth = Bandwidth(settings)
        self.received = _Received()
        self.requests = asyncio.Semaphore(settings.connections)
        self.files_at_once = asyncio.Semaphore(settings.connections)
        self.paused_until = 0.0
        self.is_stopped = False
        self.client: httpx.AsyncClient

    def _blob(self, file: HubFile) -> Path:
        return blob_path(self.settings, self.listing.repository, file)

    async def run(self, on_progress: Progress, should_stop: Callable[[], bool]) -> None:
        with _disk_errors(self.settings):
            for name in ("blobs", "snapshots"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._check_space(self.settings.margin_bytes)
        timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS, pool=None)
        # The Hub and the place that it redirects to keep theirs open.
        limits = httpx.Limits(max_connections=2 * self.settings.connections)
        try:
            client = httpx.AsyncClient(
                verify=self.settings.tls(), timeout=timeout, limits=limits, mounts=BY_ITSELF
            )
            await self._all_files(client, on_progress, should_stop)
        finally:  # what came before a stop or an error was measured, too
            note_transfer(self.settings, self.received.bytes, self.received.seconds)

    async def _all_files(
        self, client: httpx.AsyncClient, on_progress: Progress, should_stop: Callable[[], bool]
    ) -> None:
        async with client as self.client, asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch(on_progress, should_stop))
            async with asyncio.TaskGroup() as files:
                for file in self.wanted:
                    files.create_task(self._file(file))
            watching.cancel()

    async def _watch(self, on_progress: Progress, should_stop: Callable[[], bool]) -> None:
        """Report, look after the disk, and end everything when the caller wants it."""
        samples: deque[tuple[float, int]] = deque()
        report_at = space_at = time.monotonic()
        while True:
            if should_stop():
                self.is_stopped = True
                raise DownloadStoppedError(
                    f"the download of {self.listing.repository} was stopped; what arrived is kept"
                )
            now = time.monotonic()
            if now >= report_at:
                report_at = now + REPORT_SECONDS
                samples.append((now, self._done()))
                while samples[0][0] < now - RATE_SECONDS:
                    samples.popleft()
                seconds = now - samples[0][0]
                came = samples[-1][1] - samples[0][1]
                on_progress(self._done(), self.total, max(0, came) / seconds if seconds else 0.0)
            if now >= space_at + SPACE_SECONDS:
                space_at = now
                self._check_space(0, least=self.settings.margin_bytes // 2)
            await asyncio.sleep(POLL_SECONDS)

    def _done(self) -> int:
        return self.there + sum(self.arrived.values())

    def _check_space(self, margin: int, least: int = 0) -> None:
        """Check that what is missing and a margin have room.

        Raises:
            HubError: disk_full; the message says what is free and what is needed.
        """
        with _disk_errors(self.settings):
            free = shutil.disk_usage(self.folder).free
        needed = self.total - self._done()
        if free < max(needed + margin, least):
            raise HubError(
                "disk_full",
                f"the disk of {self.settings.cache} has {free / MIB:,.0f} MiB free, and "
                f"{self.listing.repository} needs {needed / MIB:,.0f} MiB more besides "
                f"{max(margin, least) / MIB:,.0f} MiB that stay free: delete models that are not "
                "used, or set HF_HOME on the host to a larger disk",
            )

    # One file

    async def _file(self, file: HubFile) -> None:
        """Have a file's blob: fetch it, or wait for the process that does."""
        lock = lock_path(self.settings.cache, self.folder, file.etag)
        while not has_blob(self.settings, self.listing, file):
            async with self.files_at_once:
                with _disk_errors(self.settings), locked(lock) as is_mine:
                    if is_mine and not has_blob(self.settings, self.listing, file):
                        await self._fetch(file)
            if not is_mine:
                self.arrived[file.etag] = arrived(self._blob(file), file.size, by_others=True)
                await asyncio.sleep(POLL_SECONDS)
        self.arrived[file.etag] = file.size

    async def _fetch(self, file: HubFile) -> None:
        """Fetch a file, which has its name when its digest is right."""
        requested = self.listing.shown(file.path)
        source = _Source(file, file_url(self.listing, file.path, self.settings), requested)
        found = ""
        for _ in range(TRIES):
            with _disk_errors(self.settings):
                partial = Partial(self._blob(file), file.size)
            try:
                await self._fill(source, partial)
                found = await self._digest(file, partial)
                with _disk_errors(self.settings):
                    if found == file.digest:
                        partial.finish()
                        return
                    partial.discard()
            finally:
                partial.close()
            source.location = ""
        raise HubError(
            "wrong_digest",
            f"{requested} arrived {TRIES} times with digest {found[:12]}…, and its listing says "
            f"{file.digest[:12]}…: it was deleted; try again later, or use another hub than "
            f"{self.settings.endpoint}",
        )

    async def _digest(self, file: HubFile, partial: Partial) -> str:
        handle = os.dup(partial.handle)  # the thread's own, if this task is cancelled
        beginning = new_digest(file)
        with _disk_errors(self.settings):
            return await asyncio.to_thread(
                Partial.digest, handle, beginning, lambda: self.is_stopped
            )

    async def _fill(self, source: _Source, partial: Partial) -> None:
        """Fetch what a file lacks: its segments at once, or all in one if there are no ranges."""
        try:
            async with asyncio.TaskGroup() as group:
                for segment in partial.segments:
                    if partial.position(segment) < segment.end:
                        group.create_task(self._segments(source, partial, [segment]))
        except* _NoRangesError:
            source.has_ranges = False
        if not source.has_ranges:
            await self._segments(source, partial, partial.segments)

    async def _segments(
        self, source: _Source, partial: Partial, segments: Sequence[Segment]
    ) -> None:
        """Fetch neighbouring segments by one request, and by further ones where it ends early."""
        failures, waited = 0, 0.0
        while True:
            if not source.has_ranges:
                partial.restart()
            before = partial.done
            try:
                async with self.requests:
                    await asyncio.sleep(max(0.0, self.paused_until - time.monotonic()))
                    await self._request(source, partial, segments)
            except _AgainError as again:
                waited += again.wait
                has_more = source.has_ranges and partial.done > before
                failures = 0 if has_more else failures + (not again.wait)
                if failures >= MAX_FAILURES or waited > MAX_WAITED_SECONDS:
                    raise again.error from None
                self.paused_until = max(self.paused_until, time.monotonic() + again.wait)
                pause = FIRST_PAUSE_SECONDS * 2 ** max(0, failures - 1) if not again.wait else 0.0
                await asyncio.sleep(min(pause, LONGEST_PAUSE_SECONDS))
            else:
                return

    # One request

    async def _request(
        self, source: _Source, partial: Partial, segments: Sequence[Segment]
    ) -> None:
        start, end = partial.position(segments[0]), segments[-1].end
        is_range = (start, end) != (0, partial.size)
        headers = {"Range": f"bytes={start}-{end - 1}"} if is_range else {}
        if source.file.version:  # of an object that may be replaced meanwhile
            headers["If-Match"] = f'"{source.file.version}"'
        async with self._response(source, headers) as response:
            self._check(response, source, f"bytes {start}-{end - 1}/{partial.size}" * is_range)
            try:
                await self._receive(response, source, partial, segments)
            except httpx.HTTPError as error:
                raise self._cut_off(error, source, partial) from None
        if partial.position(segments[-1]) < end:
            raise self._cut_off(None, source, partial)

    @asynccontextmanager
    async def _response(
        self, source: _Source, headers: dict[str, str]
    ) -> AsyncIterator[httpx.Response]:
        """Send a request, and again where it is redirected to, there without the token."""
        url = source.location or source.url
        for _ in range(MAX_REDIRECTS):
            own = {**self.settings.headers(url), **headers}
            try:
                request = self.client.build_request("GET", url, headers=own)
                response = await self.client.send(request, stream=True)
            except httpx.InvalidURL:
                raise unusual("no address", source.requested, source.url, self.settings) from None
            except httpx.HTTPError as error:
                source.location = ""
                raise self._unreachable(error, url) from None
            try:
                self._check_etag(response, source, url)
                if response.status_code not in REDIRECTS:
                    yield response
                    return
                url = source.location = urljoin(url, response.headers.get("location", ""))
                await self._read_up(response)
            finally:
                await response.aclose()
        raise unusual("redirects without end", source.requested, url, self.settings)

    async def _read_up(self, response: httpx.Response) -> None:
        """Read a short body, so that the connection is used again."""
        length = response.headers.get("content-length", "")
        if length.isdigit() and int(length) <= SHORT_BYTES:
            with suppress(httpx.HTTPError):
                await response.aread()

    def _unreachable(self, error: httpx.HTTPError, url: str) -> Exception:
        found = unreachable(error, url, self.settings)
        return found if found.kind == "tls" else _AgainError(found)

    def _check_etag(self, response: httpx.Response, source: _Source, url: str) -> None:
        """Refuse a file that is another than its listing says; its digest would find it later."""
        if response.status_code >= HTTPStatus.BAD_REQUEST or not self.settings.is_own(url):
            return
        linked = response.headers.get("x-linked-etag") or response.headers.get("etag", "")
        etag = linked.removeprefix("W/").strip('"')
        if (
            ETAG.fullmatch(etag)
            and etag != source.file.etag
            and len(etag) == len(source.file.etag)
        ):
            raise unusual(
                f"another file ({etag[:12]}…) than its listing ({source.file.etag[:12]}…)",
                source.requested, url, self.settings,
            )  # fmt: skip

    def _check(self, response: httpx.Response, source: _Source, wanted_range: str) -> None:
        """Refuse an answer without the wanted bytes.

        Raises:
            _NoRangesError: it has the whole file.
            _AgainError: it may be another one later.
            HubError: it will not be.
        """
        url, status, headers = str(response.url), response.status_code, response.headers
        if status == HTTPStatus.OK and wanted_range:
            raise _NoRangesError
        if status in {HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT}:
            got = headers.get("content-range", "") if wanted_range else ""
            if got.replace("/*", wanted_range[wanted_range.find("/") :]) != wanted_range:
                what = f"{got or 'no range'} instead of {wanted_range}"
                raise unusual(what, source.requested, url, self.settings)
            if headers.get("content-encoding", "identity") != "identity":
                what = f"compressed bytes ({headers['content-encoding']})"
                raise unusual(what, source.requested, url, self.settings)
            return
        error = refusal(status, headers, source.requested, url, self.settings)
        if source.location and status in EXPIRED:
            source.location = ""
            raise _AgainError(unusual(f"status {status}", source.requested, url, self.settings))
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            raise _AgainError(error, max(error.retry_after, POLL_SECONDS))
        if status in AGAIN:
            raise _AgainError(error, wait_seconds(headers, 0.0))
        raise error

    async def _receive(
        self,
        response: httpx.Response,
        source: _Source,
        partial: Partial,
        segments: Sequence[Segment],
    ) -> None:
        """Write what arrives to its place."""
        left = iter(segments)
        segment = next(left)
        async for part in response.aiter_raw():
            for seconds in self.bandwidth.delays(len(part)):
                await asyncio.sleep(seconds)
            self.received.add(len(part))
            data = memoryview(part)
            while data:
                room = segment.end - partial.position(segment)
                with _disk_errors(self.settings):
                    partial.write(segment, data[:room])
                data = data[room:]
                self.arrived[source.file.etag] = partial.done
                if data:
                    following = next(left, None)
                    if following is None:
                        what = f"more than the {partial.size:,} bytes of its listing"
                        raise unusual(what, source.requested, str(response.url), self.settings)
                    segment = following

    def _cut_off(
        self, error: httpx.HTTPError | None, source: _Source, partial: Partial
    ) -> _AgainError:
        """Return the error of a body that ended early."""
        if isinstance(error, httpx.TimeoutException | httpx.NetworkError):
            return _AgainError(unreachable(error, source.location or source.url, self.settings))
        return _AgainError(
            HubError(
                "truncated",
                f"{source.requested} ended after {partial.done:,} of {partial.size:,} bytes, and "
                "further requests brought no more: what arrived is kept; try again later, or use "
                f"another hub than {self.settings.endpoint}",
            )
        )
