"""Copies of models over the site: hosts' own code at both ends, over real sockets, and faults."""

import asyncio
import io
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from django.test import Client

from runners.cli import main as cli
from runners.host import model_copies as host_side
from runners.host.model_copies import ModelCopies
from runners.host.shipping import ServerClient
from runners.hub.download import download
from runners.hub.listing import look_up
from runners.hub.repository import RepositoryName
from runners.hub.selection import needed_files
from runners.hub.settings import from_environment
from runners.hub.store import resolve_offline, scan
from runners.launchers.model_uses import uses_on_host
from runners.shared.config import HostDir
from runners.shared.messages import CachedModel, CacheReport, CopyFile
from tests.hub.fixtures import FILES
from tests.hub.models import write_files
from tests.webapp.conftest import enrol, make_beat
from webapp.accounts.tokens import token_make
from webapp.agents.heartbeats import host_beat
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.problems import (
    BusyProblem,
    ConflictProblem,
    InvalidProblem,
    NotFoundProblem,
    TooLargeProblem,
)
from webapp.hosts import model_copies
from webapp.hosts.models import Host, HostModel, HostState, ModelCopy

pytestmark = pytest.mark.django_db(databases="__all__")
TINY, GIB = "acme/tiny", 2**30
A, B = "a" * 40, "b" * 40
WAIT = 30.0


class Site:
    """The site behind a socket: threads send requests, the test's own thread answers them."""

    def __init__(self) -> None:
        self.requests: queue.Queue = queue.Queue()
        self.log: list[tuple[str, str, int]] = []  # method, path, bytes of the answer
        self.answered: Callable[[str, str, bytes], bytes] = lambda _method, _path, body: body
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                reply: queue.Queue = queue.Queue()
                body = self.rfile.read(length)
                site.requests.put((self.command, self.path, dict(self.headers), body, reply))
                status, headers, data = reply.get(timeout=WAIT)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_DELETE = answer  # noqa: N815 -- their names

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Site":
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def run(self, work: Callable[[], object]) -> object:
        """Run something that calls the site in a thread, and answer meanwhile."""
        done: list[object] = []

        def running() -> None:
            try:
                done.append(work())
            except BaseException as error:
                done.append(error)

        thread = threading.Thread(target=running)
        thread.start()
        while thread.is_alive():
            try:
                method, path, headers, body, reply = self.requests.get(timeout=0.02)
            except queue.Empty:
                continue
            reply.put(self._answer(method, path, headers, body))
        if isinstance(done[0], BaseException):
            raise done[0]
        return done[0]

    def _answer(self, method: str, path: str, headers: dict, body: bytes):
        kind = headers.get("Content-Type", "application/octet-stream")
        sent = {name: headers[name] for name in ("Authorization", "Range") if name in headers}
        answer = Client(headers=sent).generic(method, path, body, kind)
        data = _whole(answer) if answer.streaming else answer.content
        data = self.answered(method, path, data)
        self.log.append((method, path, len(data)))
        kept = ("Content-Type", "Content-Range", "Retry-After")
        return answer.status_code, {n: answer[n] for n in kept if n in answer}, data

    def sent(self, part: str) -> int:
        return sum(size for method, path, size in self.log if part in path and method == "GET")


def _whole(answer) -> bytes:
    async def read() -> bytes:
        return b"".join([part async for part in answer.streaming_content])

    return asyncio.run(read())


class Machine:
    """A host with a cache of its own, and its agent's side of copies."""

    def __init__(self, site: Site, host, credential: str, folder: Path, monkeypatch) -> None:
        self.site, self.host, self._patch, self.home = site, host, monkeypatch, folder / "hf"
        host_dir = HostDir(folder / "host")
        host_dir.make()
        self.copies = ModelCopies(host_dir, ServerClient(site.url, credential), credential)

    @property
    def settings(self):
        return from_environment(
            os.environ | {"HF_HOME": str(self.home), "HF_ENDPOINT": "http://127.0.0.1:9"}
        )

    def step(self) -> None:
        """Get the orders of a heartbeat, and do what can be done."""
        self.copies.obey(host_beat(host=self.host, beat=make_beat()).copies)
        self._patch.setenv("HF_HOME", str(self.home))
        self.site.run(self.copies.step)

    def report(self) -> None:
        models = tuple(
            CachedModel(
                repository=each.repository, commit=each.commit, size_bytes=each.bytes,
                is_complete=each.is_complete,
            )
            for each in scan(self.settings)
        )  # fmt: skip
        host_beat(host=self.host, beat=make_beat(cache=CacheReport(models=models)))


@pytest.fixture
def site(settings, tmp_path, monkeypatch):
    settings.COPIES_DIR = tmp_path / "copies"
    settings.ALLOWED_HOSTS = ["*"]
    monkeypatch.setattr(model_copies, "MARGIN_BYTES", 0)
    monkeypatch.setattr(host_side, "PART_BYTES", 300_000)
    with Site() as made:
        yield made


@pytest.fixture
def ends(site, team, own_hub, tmp_path, monkeypatch) -> Iterator[tuple[Machine, Machine]]:
    """A host that has acme/tiny, and one that has nothing and reaches the site alone."""
    made = []
    for name in ("Full", "Empty"):
        host, credential = enrol(team, name=name)
        made.append(Machine(site, host, credential, tmp_path / name, monkeypatch))
    source = made[0]
    hub = from_environment(os.environ | {"HF_HOME": str(source.home)})
    listing = look_up(RepositoryName(TINY), hub)
    download(listing, needed_files(listing, "safetensors"), hub)
    source.report()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # out of reach from here on
    yield made[0], made[1]
    for each in made:
        each.copies._client.close()


def begin(ends) -> ModelCopy:
    source, target = ends
    return model_copies.copy_from_host(host=target.host, source=source.host, name=TINY, by="olga")


def files_in(machine: Machine) -> dict[str, bytes]:
    (model,) = scan(machine.settings)
    return {path.name: path.read_bytes() for path in model.folder.iterdir()}


def test_a_model_comes_from_another_host_verified_and_is_found_by_name(ends, site, settings):
    source, target = ends
    copy = begin(ends)
    assert begin(ends) == copy  # the same one
    source.step()
    copy.refresh_from_db()
    assert sorted(each["path"] for each in copy.files) == sorted(FILES)
    assert resolve_offline(TINY, "", target.settings) is None  # nothing under a name yet
    target.step()
    copy.refresh_from_db()
    assert (copy.state, copy.there_bytes) == ("done", copy.size_bytes)
    assert files_in(target) == files_in(source)
    assert resolve_offline(TINY, "", target.settings) == copy.commit
    assert resolve_offline(TINY, "main", target.settings) == copy.commit
    assert not (Path(settings.COPIES_DIR) / copy.pk).exists()
    assert host_beat(host=target.host, beat=make_beat()).copies == ()
    kinds = Event.objects.filter(kind__startswith="host.copy").values_list("kind", flat=True)
    assert sorted(kinds) == ["host.copy_begun", "host.copy_done"]
    target.report()
    with pytest.raises(ConflictProblem, match=r"Empty has acme/tiny at .* already"):
        begin(ends)


def test_what_breaks_off_goes_on_where_it_was_at_both_ends(ends, site, monkeypatch):
    source, target = ends
    begin(ends)
    sent: list[int] = []
    whole = ServerClient.send_copy_part

    def breaking(self, copy_id, number, offset, data):
        received = whole(self, copy_id, number, offset, data)
        sent.append(len(data))
        if len(sent) == 4:
            raise OSError("the cable")
        return received

    monkeypatch.setattr(ServerClient, "send_copy_part", breaking)
    source.step()
    assert source.copies.problems == ("The copy of acme/tiny waits: the cable",)
    target.step()  # takes what is whole
    source.step()
    assert source.copies.problems == ()
    size = sum(len(data) for data in files_in(source).values())
    assert sum(sent) == size  # no byte twice

    cuts = [2**19]  # bytes by which the next answer ends early: only what lacks is asked again
    site.answered = lambda _method, path, body: (
        body[: -cuts.pop()] if cuts and path.endswith("model.safetensors") else body
    )
    site.log.clear()
    target.step()
    assert ModelCopy.objects.get().state == "done"
    assert site.sent("model.safetensors") < 2**20 + 2000
    assert files_in(target) == files_in(source)


def test_a_damaged_file_is_sent_again_and_ends_the_copy_the_second_time(ends, site):
    source, target = ends
    copy = begin(ends)
    blob = next(iter(scan(source.settings))).folder / "model.safetensors"
    data = bytearray(blob.read_bytes())
    data[5] ^= 1
    blob.resolve().write_bytes(data)
    for _ in range(2):
        source.step()
        target.step()
    copy.refresh_from_db()
    assert copy.state == "failed"
    assert "model.safetensors arrived 2 times with another digest" in copy.problem
    assert resolve_offline(TINY, "", target.settings) is None  # no half model is used
    assert not list(target.settings.cache.rglob("model.safetensors"))


def test_a_source_that_lost_the_model_says_so(ends):
    source, _ = ends
    copy = begin(ends)
    shutil.rmtree(source.settings.cache)
    source.step()
    copy.refresh_from_db()
    assert copy.state == "failed"
    assert copy.problem.startswith(f"Full: acme/tiny at {copy.commit[:12]} is not, or no longer")
    assert "copy it from another one" in copy.problem


def test_a_full_disk_of_the_site_lets_the_source_wait_and_of_the_host_ends_it(
    ends, site, monkeypatch
):
    source, target = ends
    copy = begin(ends)
    usage = shutil.disk_usage
    little = usage("/")._replace(free=2**19)
    monkeypatch.setattr(model_copies.shutil, "disk_usage", lambda _path: little)
    assert site.run(lambda: None) is None
    source.step()
    state = model_copies.state_of(ModelCopy.objects.get())
    held = {each.path: each.received_bytes for each in state.files}
    assert held["model.safetensors"] == 0 < held["config.json"]
    assert source.copies.problems == ()  # the server said that it waits
    target.step()
    copy.refresh_from_db()
    assert copy.state == "failed"
    assert "GiB free, and the model needs" in copy.problem


def test_a_withdrawn_order_ends_both_and_old_copies_expire(ends, settings):
    source, _ = ends
    copy = begin(ends)
    source.step()
    assert (Path(settings.COPIES_DIR) / copy.pk).exists()
    model_copies.copy_stop(copy=copy, by="olga")
    assert not (Path(settings.COPIES_DIR) / copy.pk).exists()
    assert host_beat(host=source.host, beat=make_beat()).copies == ()
    again = begin(ends)
    assert model_copies.copies_expire() == 0
    ModelCopy.objects.filter(pk=again.pk).update(moved_at=now() - timedelta(days=8))
    assert model_copies.copies_expire() == 1
    again.refresh_from_db()
    assert (again.state, "7 days" in again.problem) == ("failed", True)


def pushed(host, *sizes: int, name: str = "acme/x", commit: str = A) -> ModelCopy:
    files = [CopyFile(path=f"f{at}", size_bytes=size, etag=A) for at, size in enumerate(sizes)]
    return model_copies.copy_from_folder(
        host=host, repository=name, commit=commit, revision="", files=files, by="olga"
    )


def part(copy: ModelCopy, offset: int, data: bytes, number: int = 0) -> int:
    body = io.BytesIO(data)
    return model_copies.part_write(copy=copy, number=number, offset=offset, body=body)


def test_a_process_that_ends_before_the_name_of_a_file_wedges_no_copy(site, host, monkeypatch):
    copy = pushed(host, 6)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            part(copy, 0, b"abcdef")
    with pytest.raises(NotFoundProblem):
        model_copies.file_at(copy, "f0")
    assert model_copies.state_of(copy).files[0].received_bytes == 6
    assert model_copies.file_at(copy, "f0").read_bytes() == b"abcdef"


def test_parts_that_come_at_once_or_too_long_damage_no_file(site, host):
    copy = pushed(host, 6)

    class Slow(io.BytesIO):  # while its body comes, another call sends the same part
        def read(self, size=-1):
            if not others:
                others.append(threading.Thread(target=lambda: ends.append(written())))
                others[0].start()
                others[0].join(0.2)  # it waits for this one
            return super().read(size)

    def written() -> int:
        try:
            with model_copies._locked(held) as handle:
                return os.fstat(handle).st_size
        except BaseException as error:
            return error

    held, others, ends = model_copies._held(copy, 0), [], []
    assert model_copies.part_write(copy=copy, number=0, offset=0, body=Slow(b"abc")) == 3
    others[0].join(WAIT)
    assert ends == [3]
    assert part(copy, 0, b"xyz") == 3  # what another call has written stays
    held.partial.write_bytes(b"longer than it")
    assert model_copies.state_of(copy).files[0].received_bytes == 0
    assert part(copy, 0, b"abc") == 3
    with pytest.raises(TooLargeProblem):
        part(copy, 3, b"defg")
    assert part(copy, 3, b"def") == 6
    assert model_copies.file_at(copy, "f0").read_bytes() == b"abcdef"


def test_of_two_copies_that_lack_room_the_earlier_goes_on(site, host, settings, monkeypatch):
    first, second = pushed(host, 10), pushed(host, 10, name="acme/y")
    for free, copy, is_begun in (
        (30, second, True), (29, first, True), (15, second, False), (15, first, True),
    ):  # fmt: skip
        usage = shutil.disk_usage("/")._replace(free=free)
        monkeypatch.setattr(model_copies.shutil, "disk_usage", lambda _, usage=usage: usage)
        offset = model_copies.state_of(copy).files[0].received_bytes
        if is_begun:
            assert part(copy, offset, b"x") == offset + 1
        else:
            with pytest.raises(BusyProblem, match="for files that came before"):
                part(copy, offset, b"x")
    ModelCopy.objects.filter(pk=first.pk).update(moved_at=now() - timedelta(hours=1))
    assert part(second, 1, b"x") == 2  # who stands still keeps no room
    usage = shutil.disk_usage("/")._replace(total=2**34)
    monkeypatch.setattr(model_copies.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InvalidProblem, match=r"f0 has 17.0 GiB, and the server's disk .* 16.0 in"):
        pushed(host, 17 * GIB, name="acme/z")
    announced = ModelCopy.objects.create(host=host, repository="acme/w", commit=A)
    big = [CopyFile(path="f", size_bytes=17 * GIB, etag=A)]
    model_copies.files_announce(copy=announced, files=big, revision="")
    assert (announced.state, "16.0 in all" in announced.problem) == ("failed", True)


def test_what_no_copy_needs_is_deleted_and_a_retired_host_ends_its_copies(site, host, settings):
    copy = pushed(host, 6)
    part(copy, 0, b"abc")
    left = Path(settings.COPIES_DIR) / "of-no-row"
    left.mkdir()
    assert model_copies.copies_expire() == 0
    assert [each.name for each in Path(settings.COPIES_DIR).iterdir()] == [copy.pk]
    Host.objects.filter(pk=host.pk).update(state=HostState.RETIRED)
    assert model_copies.copies_expire() == 1
    copy.refresh_from_db()
    assert (copy.state, copy.problem) == ("failed", f"{host.name} was retired.")
    assert not list(Path(settings.COPIES_DIR).iterdir())


def test_a_file_that_the_host_lost_after_it_took_it_comes_again(ends, monkeypatch):
    source, target = ends
    copy = begin(ends)
    source.step()
    link = host_side.link_files
    monkeypatch.setattr(host_side, "link_files", lambda *_: (_ for _ in ()).throw(OSError("full")))
    target.step()
    monkeypatch.setattr(host_side, "link_files", link)
    blob = max(target.settings.cache.rglob("blobs/*"), key=lambda each: each.stat().st_size)
    blob.unlink()
    for machine in (target, source, target):
        machine.step()
    copy.refresh_from_db()
    assert copy.state == "done"
    assert files_in(target) == files_in(source)


def test_one_bad_order_stops_no_other_copy_and_no_copied_model_is_deleted(ends, monkeypatch):
    source, _ = ends
    begin(ends)
    refs = source.settings.repository_folder(TINY) / "refs"
    (refs / "main").rename(refs / "release@1")
    orders = host_beat(host=source.host, beat=make_beat()).copies
    bad = orders[0].model_copy(update={"copy_id": "bad"})
    carry_out = ModelCopies._carry_out
    monkeypatch.setattr(
        ModelCopies, "_carry_out",
        lambda self, order: 1 / 0 if order.copy_id == "bad" else carry_out(self, order),
    )  # fmt: skip
    source.copies.obey((bad, *orders))
    is_used = uses_on_host(source.copies._host_dir.attempts)
    assert (is_used(TINY), is_used("acme/other")) == (True, False)
    monkeypatch.setenv("HF_HOME", str(source.home))
    source.site.run(source.copies.step)
    assert "division by zero" in source.copies.problems[0]
    copy = ModelCopy.objects.get()
    assert (copy.revision, len(copy.files)) == ("", len(FILES))
    source.copies.obey(())
    assert not is_used(TINY)


def test_what_cannot_be_copied_is_refused_in_words(ends, host):
    source, target = ends
    kept = source.host.models.get()
    data = {"size_bytes": 1, "num_files": 1, "is_complete": True, "commit": B}
    HostModel.objects.create(host=source.host, repository="datasets/acme/rows", **data)
    for name, words in (
        ("acme/none", "it has acme/tiny"),
        ("datasets/acme/rows", "data sets are not copied"),
        (f"{TINY}@{kept.commit[:6]}", "at least 7 digits"),
    ):
        with pytest.raises(NotFoundProblem, match=words):
            model_copies.copy_from_host(host=target.host, source=source.host, name=name, by="olga")
    with pytest.raises(InvalidProblem, match="cannot be its own source"):
        model_copies.copy_from_host(host=source.host, source=source.host, name=TINY, by="olga")
    begin(ends)
    with pytest.raises(ConflictProblem, match="being copied to Empty from Full"):
        model_copies.copy_from_folder(
            host=target.host, repository=TINY, commit=kept.commit, revision="", by="olga",
            files=[CopyFile(path="config.json", size_bytes=1, etag=A)],
        )  # fmt: skip
    for path in ("../x", "/etc/passwd", "a//b"):
        with pytest.raises(InvalidProblem, match="none below a model's folder"):
            model_copies.copy_from_folder(
                host=host, repository="acme/x", commit=A, revision="", by="olga",
                files=[CopyFile(path=path, size_bytes=1, etag=A)],
            )  # fmt: skip


def test_a_host_reads_and_writes_in_its_own_copies_only(ends, host, credential):
    source, _ = ends
    copy = begin(ends)
    source.step()
    stranger = Client(headers={"Authorization": f"Bearer {credential}"})
    sender = Client(headers={"Authorization": f"Bearer {source.copies._credential}"})
    base = f"/api/v1/copies/{copy.pk}"
    file = f"{base}/hub/{TINY}/resolve/{copy.commit}/config.json"
    for client, method, path in (
        (stranger, "GET", base), (stranger, "GET", file), (stranger, "POST", f"{base}/end"),
        (sender, "GET", file), (sender, "POST", f"{base}/files/0/taken"),
        (sender, "POST", f"{base}/end"),
    ):  # fmt: skip
        body = '{"problem": ""}' if path.endswith("end") else ""
        answer = client.generic(method, path, body, "application/json")
        assert (answer.status_code, answer.json()["code"]) == (404, "no_copy"), (method, path)


@pytest.fixture
def push(site, ends, team, olga, tmp_path, monkeypatch, capsys):
    """Run ``slipway models push`` against the site, with the second host at work beside it."""
    _, text = token_make(team=team, by=olga, name="t", scope="admin")
    monkeypatch.setenv("SLIPWAY_SERVER", site.url)
    monkeypatch.setenv("SLIPWAY_TOKEN", text)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("runners.cli.model_copies.LOOK_SECONDS", 0.05)

    def call(*arguments: str) -> tuple[int, str, str]:
        done: list[int] = []
        ended = threading.Event()

        def pushing() -> None:
            done.append(cli.main(["models", "push", *map(str, arguments)]))
            ended.set()

        thread = threading.Thread(target=pushing)
        thread.start()
        while not ended.wait(0.02):
            site.run(lambda: ended.wait(0.1))
            ends[1].step()
        thread.join()
        out, err = capsys.readouterr()
        return done[0], out, err

    return call


def test_a_folder_of_a_person_comes_into_the_cache_of_a_host(
    push, ends, own_hub, tmp_path, monkeypatch
):
    _, target = ends
    folder = tmp_path / "plain"
    write_files(folder, {**FILES, "pytorch_model.bin": 100, "modeling_x.py": "exit()"})
    code, _, err = push(folder, target.host.slug)
    assert (code, "--as is missing" in err) == (2, True), err
    code, out, err = push(folder, target.host.slug, "--as", "acme/mine")
    assert code == 0, err
    assert "The Hub was not asked for its commit" in err
    assert sorted(files_in(target)) == sorted(FILES)  # neither pickles nor code
    commit = resolve_offline("acme/mine", "", target.settings)
    assert f"acme/mine at {commit} is in the cache of {target.host.slug}" in out
    assert (target.settings.repository_folder("acme/mine") / "refs/main").read_text() == commit
    # The Hub's own files are named by its commit.
    monkeypatch.setenv("HF_ENDPOINT", own_hub.url)
    code, out, err = push(own_hub.folder / TINY, target.host.slug, "--as", TINY)
    assert (code, own_hub.commit(TINY) in out) == (0, True), err
