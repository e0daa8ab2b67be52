"""A download: resumed after kill -9, shared, verified, limited, stopped; and what others see."""

import errno
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import WeakFileLock

from runners.hub import download as module
from runners.hub import partial
from runners.hub.download import download
from runners.hub.errors import DownloadStoppedError, HubError
from runners.hub.partial import arrived, lock_path
from runners.hub.selection import needed_files
from runners.hub.store import blob_path, missing, repository_folder
from tests.hub.models import write_files
from tests.runners.hub.conftest import FILES, REPOSITORY, SIZE, WEIGHTS

MIB = 2**20
SMALL = sum(len(text) for text in FILES.values() if isinstance(text, str))
BLOCK = 128 * 2**10  # of what is in flight at a connection: the buffers of both ends
CHILD = """
import sys
from pathlib import Path
from runners.hub import download, partial
from runners.hub.listing import look_up
from runners.hub.names import parse
from runners.hub.selection import needed_files
from runners.hub.settings import HubSettings
partial.SEGMENT_BYTES = int(sys.argv[3])
download.REPORT_SECONDS = 0.05
settings = HubSettings(endpoint=sys.argv[1], cache=Path(sys.argv[2]), margin_bytes=0)
listing = look_up(parse("acme/tiny"), settings)
files = needed_files(listing, "safetensors")
note = lambda done, total, rate: print(done, total, flush=True)
print(download.download(listing, files, settings, on_progress=note))
"""
Usage = namedtuple("Usage", "total used free")


class Child:
    """A process that downloads the repository."""

    def __init__(self, settings, segment_bytes: int = 64 * MIB) -> None:
        words = [settings.endpoint, str(settings.cache), str(segment_bytes)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, *words], stdout=subprocess.PIPE, text=True
        )

    def reaches(self, num_bytes: int) -> None:
        """Wait until the process has seen so many bytes arrive."""
        for line in self.process.stdout:
            if int(line.split()[0]) >= num_bytes:
                return
        pytest.fail("it ended before")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def folder(self) -> Path:
        """Return the folder that it ends with."""
        lines = self.process.communicate(timeout=60)[0].splitlines()
        assert self.process.returncode == 0
        return Path(lines[-1])


@pytest.fixture
def listing(looked_up):
    return looked_up()


@pytest.fixture
def files(listing):
    return needed_files(listing, "safetensors")


@pytest.fixture
def blob(listing, settings) -> Path:
    return blob_path(settings, REPOSITORY, listing.file(WEIGHTS))


@pytest.fixture
def open_hub(hub) -> Iterator[None]:
    """End answers that are held, whatever happens."""
    yield
    hub.hold_at = -1
    hub.go_on.set()


def refused(*arguments: object, **callbacks: object) -> HubError:
    with pytest.raises(HubError) as error:
        download(*arguments, **callbacks)
    return error.value


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def names_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_other_tools_find_what_was_downloaded(hub, settings, listing, files):
    seen: list[tuple[int, int, float]] = []
    folder = download(listing, files, settings, on_progress=lambda *each: seen.append(each))
    for name in FILES:
        assert (folder / name).read_bytes() == (hub.folder / REPOSITORY / name).read_bytes()
        assert huggingface_hub.try_to_load_from_cache(REPOSITORY, name, settings.cache)
    found = huggingface_hub.snapshot_download(
        REPOSITORY, cache_dir=settings.cache, local_files_only=True
    )
    assert Path(found) == folder
    assert [each.warnings for each in [huggingface_hub.scan_cache_dir(settings.cache)]] == [[]]
    total = sum(file.size for file in files)
    assert seen[-1] == (total, total, 0.0)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert names_of(folder.parents[1] / "blobs") == sorted(file.etag for file in files)
    sent = hub.sent("/lfs/")
    assert download(listing, files, settings) == folder
    huggingface_hub.snapshot_download(REPOSITORY, endpoint=hub.url, cache_dir=settings.cache)
    assert hub.sent("/lfs/") == sent


@pytest.mark.usefixtures("open_hub")
def test_what_arrived_before_kill_9_is_not_sent_again(
    hub, settings, listing, files, blob, monkeypatch
):
    for segment_bytes in (64 * MIB, MIB // 2):  # one request, and several at once
        monkeypatch.setattr(partial, "SEGMENT_BYTES", segment_bytes)
        hub.large_sent, hub.hold_at = 0, 2 * MIB
        hub.go_on.clear()
        child = Child(settings, segment_bytes)
        child.reaches(2 * MIB - 8 * BLOCK)
        child.kill()
        kept, before = arrived(blob, SIZE), hub.sent("/lfs/")
        assert kept >= 2 * MIB - 8 * BLOCK
        assert names_of(repository_folder(settings, REPOSITORY) / "snapshots") == []
        hub.hold_at = -1
        hub.go_on.set()
        folder = download(listing, files, settings)
        again = hub.sent("/lfs/") - before
        assert SIZE - kept <= again <= SIZE - kept + BLOCK, segment_bytes
        assert (folder / WEIGHTS).read_bytes() == (hub.folder / REPOSITORY / WEIGHTS).read_bytes()
        shutil.rmtree(settings.cache)


@pytest.mark.usefixtures("open_hub")
@pytest.mark.parametrize("dies", [False, True], ids=["both end", "one is killed"])
def test_two_processes_fetch_a_file_once_and_one_goes_on_when_the_other_dies(hub, settings, dies):
    hub.hold_at = MIB
    first = Child(settings)
    first.reaches(MIB - BLOCK)
    second = Child(settings)
    second.reaches(MIB - BLOCK)  # of what the first one fetches
    assert hub.sent("/lfs/") <= MIB + BLOCK
    if dies:
        first.kill()
    hub.hold_at = -1
    hub.go_on.set()
    folder = second.folder()
    assert dies or first.folder() == folder
    assert (folder / WEIGHTS).read_bytes() == (hub.folder / REPOSITORY / WEIGHTS).read_bytes()
    assert SIZE <= hub.sent("/lfs/") <= SIZE + dies * BLOCK
    assert sum(each.sent for each in hub.log if "/resolve/" in each.path) == SMALL


@pytest.mark.usefixtures("open_hub")
def test_a_download_stops_at_once_and_keeps_what_arrived(hub, settings, listing, files, blob):
    hub.hold_at = MIB
    stopped_at = 0.0

    def should_stop() -> bool:
        nonlocal stopped_at
        if arrived(blob, SIZE) >= MIB - BLOCK:
            stopped_at = stopped_at or time.monotonic()
        return bool(stopped_at)

    with pytest.raises(DownloadStoppedError, match="what arrived is kept"):
        download(listing, files, settings, should_stop=should_stop)
    assert time.monotonic() - stopped_at < 2
    assert arrived(blob, SIZE) >= MIB - BLOCK
    with closing(socket.socket()) as silent:  # a hub that takes connections and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent_hub = replace(settings, endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(DownloadStoppedError):
            download(
                listing, files, silent_hub, should_stop=lambda: time.monotonic() > began + 0.3
            )
        assert time.monotonic() - began < 2.3


def test_a_download_keeps_within_its_rate(settings, listing, files):
    began = time.monotonic()
    rates: list[float] = []
    download(
        listing, files, replace(settings, max_bytes_per_second=6 * MIB),
        on_progress=lambda _done, _total, rate: rates.append(rate),
    )  # fmt: skip
    assert time.monotonic() - began > 0.9 * SIZE / (6 * MIB)
    assert max(rates) < 9 * MIB


@pytest.mark.usefixtures("quick")
def test_a_wrong_byte_is_fetched_once_more_and_then_refused(hub, settings, listing, files):
    hub.corrupted[WEIGHTS] = 1
    folder = download(listing, files, settings)
    assert (folder / WEIGHTS).read_bytes() == (hub.folder / REPOSITORY / WEIGHTS).read_bytes()
    shutil.rmtree(settings.cache)
    hub.corrupted[WEIGHTS] = 2
    error = refused(listing, files, settings)
    assert (error.kind, "arrived 2 times" in str(error)) == ("wrong_digest", True)
    store = repository_folder(settings, REPOSITORY)
    assert listing.file(WEIGHTS).etag not in "".join(names_of(store / "blobs"))
    assert names_of(store / "snapshots") == []


@pytest.mark.usefixtures("quick")
def test_answers_that_end_early_or_fail_for_a_while_are_made_up_for(hub, settings, listing, files):
    faults = {
        "cut off": lambda: hub.truncated.update({WEIGHTS: 3}),
        "errors": lambda: hub.failing.extend([503, 500, 502]),
        "limited": lambda: hub.limited.extend(["0", "0"]),
        "signature": lambda: setattr(hub, "expired", 2),
    }
    for name, begin in faults.items():
        begin()
        before = hub.sent("/lfs/")
        folder = download(listing, files, settings)
        assert (folder / WEIGHTS).read_bytes() == (hub.folder / REPOSITORY / WEIGHTS).read_bytes()
        assert hub.sent("/lfs/") - before in range(SIZE, SIZE + 100), name
        shutil.rmtree(settings.cache)


@pytest.mark.usefixtures("quick")
def test_what_does_not_end_is_refused_with_its_kind(hub, settings, listing, files, monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITED_SECONDS", 0.05)
    weights = listing.file(WEIGHTS)
    other = replace(weights, etag="0" * 64, sha256="0" * 64)
    gone = replace(listing, commit="0" * 40)
    longer = replace(weights, size=SIZE + 5)
    cases = {
        "cut off": ({"truncated": {WEIGHTS: 99}}, listing, files, "truncated", "ended after"),
        "errors": ({"failing": [503] * 99}, listing, files, "mirror", "status 503"),
        "limited": ({"limited": ["1"] * 9}, listing, files, "rate_limited", "again in 1 s"),
        "signatures": ({"expired": 99}, listing, files, "mirror", "status 403"),
        "gated": ({"gated": {REPOSITORY: "auto"}}, listing, files, "gated", "is gated"),
        "another file": ({}, listing, [other], "mirror", "another file"),
        "a commit that is gone": ({}, gone, files, "absent", "at revision 'main': name a branch"),
        "shorter than its listing": ({}, listing, [longer], "mirror", "answers"),
    }
    for name, (faults, found, wanted, kind, words) in cases.items():
        usual = {fault: getattr(hub, fault) for fault in faults}
        for fault, value in faults.items():
            setattr(hub, fault, type(usual[fault])(value))
        error = refused(found, wanted, settings)
        assert (name, error.kind, words in str(error)) == (name, kind, True), str(error)
        for fault, value in usual.items():
            setattr(hub, fault, value)
        shutil.rmtree(settings.cache, ignore_errors=True)


def test_a_server_without_ranges_sends_the_whole_file(
    hub, settings, listing, files, blob, monkeypatch
):
    monkeypatch.setattr(partial, "SEGMENT_BYTES", MIB)
    hub.has_ranges = False
    hub.truncated[WEIGHTS] = 1
    folder = download(listing, files, settings)
    assert (folder / WEIGHTS).read_bytes() == (hub.folder / REPOSITORY / WEIGHTS).read_bytes()


def test_the_token_goes_to_the_hub_and_not_where_it_redirects_to(hub, settings, looked_up):
    hub.tokens, hub.storage = {"hf_secret"}, f"http://localhost:{hub.port}"
    secret = replace(settings, token="hf_secret")
    listing = looked_up(token="hf_secret")
    download(listing, needed_files(listing, "safetensors"), secret)
    sent = {(each.host.partition(":")[0], each.authorization) for each in hub.log if each.status}
    assert sent == {("127.0.0.1", "Bearer hf_secret"), ("localhost", "")}


def test_a_full_disk_is_said_before_and_during_a_download(
    hub, settings, listing, files, small_disk, monkeypatch
):
    before = hub.sent()
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(10 * MIB, 8 * MIB, 2 * MIB))
    error = refused(listing, files, replace(settings, margin_bytes=MIB))
    assert (error.kind, hub.sent()) == ("disk_full", before)
    assert "has 2 MiB free, and acme/tiny needs 3 MiB more besides 1 MiB" in str(error)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(10 * MIB, 0, 10 * MIB))
    small = replace(settings, cache=small_disk / "cache")
    error = refused(listing, files, small)
    assert (error.kind, "is full: delete models" in str(error)) == ("disk_full", True)
    assert listing.file(WEIGHTS) in missing(listing, files, small)


@pytest.mark.usefixtures("open_hub")
def test_a_disk_that_others_fill_ends_a_download(hub, settings, listing, files, monkeypatch):
    monkeypatch.setattr(module, "SPACE_SECONDS", 0.0)
    free = 10 * MIB
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(10 * MIB, 0, free))
    hub.hold_at = MIB

    def fill(_done: int, _total: int, _rate: float) -> None:
        nonlocal free
        free = 100

    error = refused(listing, files, replace(settings, margin_bytes=MIB), on_progress=fill)
    assert error.kind == "disk_full"


def test_a_cache_that_cannot_be_written_is_named(settings, listing, files, tmp_path):
    (tmp_path / "file").touch()
    error = refused(listing, files, replace(settings, cache=tmp_path / "file" / "cache"))
    assert (error.kind, "set HF_HOME" in str(error)) == ("cache", True)


def test_a_file_that_huggingface_hub_is_fetching_is_waited_for(
    hub, settings, listing, files, blob
):
    lock = lock_path(settings.cache, repository_folder(settings, REPOSITORY), blob.name)
    lock.parent.mkdir(parents=True)
    held = ExitStack()
    held.enter_context(WeakFileLock(lock))
    blob.parent.mkdir(parents=True)
    blob.with_name(f"{blob.name}.0badcafe.incomplete").write_bytes(b"x" * MIB)

    def end(done: int, _total: int, _rate: float) -> None:
        if done >= MIB and not blob.exists():
            shutil.copy(hub.folder / REPOSITORY / WEIGHTS, blob)
            held.close()

    download(listing, files, settings, on_progress=end)
    assert hub.sent("/lfs/") == 0


def test_many_files_need_few_handles_and_one_request_each(hub, settings, looked_up, monkeypatch):
    names = [f"model-{at:05}-of-00080.safetensors" for at in range(1, 81)]
    index = {"model.safetensors.index.json": "{}", "config.json": "{}"}
    write_files(hub.folder / "acme/many", index | dict.fromkeys(names, 1000))
    listing = looked_up("acme/many")
    files = needed_files(listing, "safetensors")
    most = 0

    def count(*_: object) -> None:
        nonlocal most
        most = max(most, open_files())

    monkeypatch.setattr(module, "REPORT_SECONDS", 0.0)
    before = open_files()
    download(listing, files, settings, on_progress=count)
    assert most - before < 10 * settings.connections
    assert sum("/lfs/" in each.path for each in hub.log) == 80
    assert missing(listing, files, settings) == ()


def test_without_a_network_nothing_is_asked_for(settings, listing, files):
    error = refused(listing, files, replace(settings, is_offline=True))
    assert (error.kind, "lacks 3 files here" in str(error)) == ("offline", True)
    assert errno.ENOSPC in module.FULL
