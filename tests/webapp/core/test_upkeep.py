"""Upkeep: what retention deletes, commands that run one at a time, collected assets."""

import asyncio
import gzip
import json
import os
from datetime import timedelta
from pathlib import Path

import brotli
import pytest
import servestatic.middleware
import time_machine
from django.contrib.sessions.models import Session
from django.core.files.base import ContentFile
from django.core.management import CommandError, call_command
from servestatic.middleware import ServeStaticMiddleware

from tests.webapp.conftest import EXIT_OK, batch_of, client_of
from tests.webapp.jobs.test_uploads import body_of
from webapp.accounts.models import LoginTry, OpenSession
from webapp.agents.ingest import events_accept
from webapp.audit import chain
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.middleware import MOST_UNANSWERED, SerializePerCredential
from webapp.core.staticfiles import HashedStaticFilesStorage
from webapp.hosts.models import EnrolmentToken
from webapp.jobs.artefacts import folder_of
from webapp.jobs.models import Artefact, AttemptEvent, Job
from webapp.metrics.models import MetricChunk
from webapp.modelhub.models import TeamModel
from webapp.operations.ticker import Lifetimes, heaps

# What goes by retention, what never does, and what the command says before.


pytestmark = pytest.mark.django_db(databases="__all__")
LINE = ("log", {"stream": "stdout", "text": "x" * 1000})


@pytest.fixture
def ended(attempt, settings, tmp_path):
    """An attempt that wrote lines, left a model and ended."""
    settings.ARTEFACTS_DIR = tmp_path
    events = [LINE, LINE, ("artefact", body_of()), ("exited", EXIT_OK)]
    events_accept(host=attempt.host, batch=batch_of(attempt, *events))
    folder = folder_of(Artefact.objects.get())
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"w" * 5000)
    return attempt


def heap(name: str, lifetimes: Lifetimes | None = None):
    return next(each for each in heaps(lifetimes or Lifetimes()) if each.name == name)


def later(**span):
    return time_machine.travel(now() + timedelta(**span))


def test_lines_of_a_job_that_still_runs_are_never_old(attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, LINE))
    with later(days=9999):
        assert heap("lines of logs").num_things == 0


def test_lines_of_an_old_job_go_young_ones_and_how_it_ended_stay(ended):
    with later(days=179):
        assert heap("lines of logs").num_things == 0
    with later(days=181):
        found = heap("lines of logs")
        assert found.num_things == 2
        assert found.num_bytes > 2000
        assert found.remove() == 2
    assert [row.kind for row in AttemptEvent.objects.all()] == ["artefact", "exited"]


def test_points_go_by_their_lifetimes(db):
    for step_ms in (0, 15_000):
        MetricChunk.objects.create(
            attempt_id="a", source="job", metric="loss", step_ms=step_ms, t0_ms=0, t1_ms=1, n=1,
            body=b"x" * 300,
        )  # fmt: skip
    assert heap("raw points").num_bytes == 400
    heap("raw points").remove()
    assert [chunk.step_ms for chunk in MetricChunk.objects.all()] == [15_000]
    heap("rolled-up points").remove()
    assert not MetricChunk.objects.exists()


def test_files_go_with_their_job_unless_the_team_lists_the_model(ended):
    assert TeamModel.objects.count() == 1
    Job.objects.update(deleted_at=now())
    with later(days=9999):
        assert heap("artefacts of deleted jobs").num_things == 0
    TeamModel.objects.all().delete()
    Job.objects.update(deleted_at=now())
    folder = folder_of(Artefact.objects.get())
    with later(days=31):
        found = heap("artefacts of deleted jobs")
        assert (found.num_things, found.num_bytes) == (1, 5000)
        found.remove()
    assert not folder.exists()
    assert not Artefact.objects.exists()


def test_files_of_a_job_that_nobody_deleted_stay(ended):
    TeamModel.objects.all().delete()
    with later(days=9999):
        assert heap("artefacts of deleted jobs").num_things == 0


def test_sessions_that_ran_out_go_and_open_ones_stay(alice, bob):
    client_of(alice)
    with later(hours=13):
        client_of(bob)
        heap("ended sessions").remove()
        heap("browsers without a session").remove()
        assert Session.objects.count() == 1
        assert [row.user for row in OpenSession.objects.all()] == [bob]


def test_tokens_and_tries_go(host):
    LoginTry.objects.create(account="a" * 64, address="::1", at=now())
    with later(days=32):
        heap("tokens").remove()
        heap("tried passwords").remove()
    assert not EnrolmentToken.objects.exists()
    assert not LoginTry.objects.exists()


def test_the_dry_run_says_what_would_go_and_deletes_nothing(ended, capsys):
    chain.events_seal()
    before = (Event.objects.count(), AttemptEvent.objects.count())
    with later(days=2000):
        call_command("prune", "--dry-run")
    told = capsys.readouterr().out
    assert "lines of logs" in told
    assert "in total (estimated)" in told
    assert (Event.objects.count(), AttemptEvent.objects.count()) == before


def test_yes_deletes_the_chain_holds_and_a_second_run_finds_nothing_more(ended, capsys):
    chain.events_seal()
    with later(days=2000):
        call_command("prune", "--yes")
        call_command("audit", "verify")
    assert "events of the history" in capsys.readouterr().out
    assert [event.kind for event in Event.objects.all()] == ["audit.cut"]
    assert not AttemptEvent.objects.filter(kind="log").exists()
    with later(days=2000):
        call_command("prune", "--yes")
    assert "\ndeleted " not in capsys.readouterr().out


def test_it_does_nothing_without_being_told_which_and_for_how_long(db):
    for words in [[], ["--dry-run", "--yes"]]:
        with pytest.raises(CommandError):
            call_command("prune", *words)
    with pytest.raises(CommandError, match="--logs-days is 0"):
        call_command("prune", "--yes", "--logs-days", "0")


# The requests of one credential are answered one after another; others do not wait for them.


MALLORY = (b"authorization", b"Bearer mallory")
ADA = (b"authorization", b"Bearer ada")


class Caller:
    """Sends requests to an application that answers when it is told to."""

    def __init__(self):
        self.application = SerializePerCredential(self.answer, lambda send: send)
        self.running = self.most_running = 0
        self.go_on = asyncio.Event()

    async def answer(self, _scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        await self.go_on.wait()
        self.running -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def call(self, *headers, body=None):
        """Return the messages of an answer; ``body`` stays away until it is set."""
        sent = []

        async def receive():
            if body is not None:
                await body.wait()
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        await self.application({"type": "http", "headers": list(headers)}, receive, send)
        return sent

    async def settle(self):
        for _ in range(3 * MOST_UNANSWERED):
            await asyncio.sleep(0)


def start(caller, num, *headers, **options):
    return [asyncio.create_task(caller.call(*headers, **options)) for _ in range(num)]


@pytest.mark.asyncio
async def test_one_credential_has_one_request_at_a_time_and_others_do_not_wait():
    caller = Caller()
    tasks = start(caller, 5, MALLORY)
    await caller.settle()
    assert caller.running == 1
    tasks += start(caller, 1, ADA) + start(caller, 3)
    await caller.settle()
    assert caller.running == 1 + 1 + 3  # hers, and pages without a credential
    caller.go_on.set()
    answers = await asyncio.gather(*tasks)
    assert [answer[0]["status"] for answer in answers] == [200] * 9
    assert caller.most_running == 5


@pytest.mark.asyncio
async def test_a_body_that_is_slow_to_come_holds_up_nothing():
    caller, body = Caller(), asyncio.Event()
    caller.go_on.set()
    (slow,) = start(caller, 1, MALLORY, body=body)
    await caller.settle()
    async with asyncio.timeout(5):
        await caller.call(MALLORY)
    assert not slow.done()
    body.set()
    assert (await slow)[0]["status"] == 200


@pytest.mark.asyncio
async def test_an_answer_that_is_slow_to_be_taken_holds_up_nothing():
    is_taken, started = asyncio.Event(), asyncio.Event()

    async def answer(_scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        started.set()
        await is_taken.wait()

    caller = Caller()
    caller.application = SerializePerCredential(answer, lambda send: send)
    (slow,) = start(caller, 1, MALLORY)
    await started.wait()
    started.clear()
    (other,) = start(caller, 1, MALLORY)

    async with asyncio.timeout(5):
        await started.wait()  # of the other one

    is_taken.set()
    await asyncio.gather(slow, other)


@pytest.mark.asyncio
async def test_too_many_at_once_are_refused_in_words_and_the_next_are_taken():
    caller = Caller()
    tasks = start(caller, MOST_UNANSWERED, MALLORY)
    await caller.settle()
    refused = await caller.call(MALLORY)
    assert refused[0]["status"] == 429
    assert dict(refused[0]["headers"])[b"retry-after"] == b"2"
    problem = json.loads(refused[1]["body"])
    assert problem["code"] == "too_many_at_once"
    assert str(MOST_UNANSWERED) in problem["detail"]
    caller.go_on.set()
    await asyncio.gather(*tasks)
    assert (await caller.call(MALLORY))[0]["status"] == 200


@pytest.mark.asyncio
async def test_one_that_fails_or_is_cancelled_lets_the_next_begin():
    fails = [ValueError("broken")]

    async def answer(_scope, receive, send):
        await receive()
        if fails:
            raise fails.pop()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    caller = Caller()
    (cancelled,) = start(caller, 1, MALLORY)
    await caller.settle()
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    caller.go_on.set()
    assert (await caller.call(MALLORY))[0]["status"] == 200

    caller.application = SerializePerCredential(answer, lambda send: send)
    with pytest.raises(ValueError, match="broken"):
        await caller.call(MALLORY)
    assert (await caller.call(MALLORY))[0]["status"] == 200
    assert len(caller.application._turns) == 0


# Assets that are collected while somebody reads them: none is missing or half written.


@pytest.fixture
def assets(tmp_path, settings) -> Path:
    """Two assets of our own, of which one names the other; collected below ``static``."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "page.css").write_text("a { background: url('dot.svg'); }")
    (source / "dot.svg").write_text("<svg/>")
    settings.STATICFILES_DIRS = [source]
    settings.STATICFILES_FINDERS = ["django.contrib.staticfiles.finders.FileSystemFinder"]
    settings.STATIC_ROOT = tmp_path / "static"
    settings.STORAGES = settings.STORAGES | {
        "staticfiles": {"BACKEND": "webapp.core.staticfiles.HashedStaticFilesStorage"}
    }
    return source


def collect() -> None:
    call_command("collectstatic", interactive=False, verbosity=0)


async def answer_nothing(_request):
    """What stands behind the middleware here."""


def named(root: Path) -> list[Path]:
    """Return the files that the manifest names."""
    manifest = json.loads((root / "staticfiles.json").read_text())
    return [root / name for name in manifest["paths"].values()]


def test_a_second_collecting_takes_no_file_away_at_any_moment(assets, settings, monkeypatch):
    collect()
    files = [settings.STATIC_ROOT / "staticfiles.json", *named(settings.STATIC_ROOT)]
    moments = []
    write = HashedStaticFilesStorage._save

    def watched(self, name, content):
        moments.append(all(file.stat().st_size for file in files))
        return write(self, name, content)

    monkeypatch.setattr(HashedStaticFilesStorage, "_save", watched)
    collect()

    assert len(moments) > 1
    assert all(moments)


def test_a_web_process_may_start_at_any_moment_of_it(assets, settings, monkeypatch):
    settings.DEBUG = False
    collect()
    served = []
    write = HashedStaticFilesStorage._save

    def starting(self, name, content):
        another_process = HashedStaticFilesStorage()
        monkeypatch.setattr(servestatic.middleware, "staticfiles_storage", another_process)
        served.append(len(ServeStaticMiddleware(answer_nothing).files))
        return write(self, name, content)

    monkeypatch.setattr(HashedStaticFilesStorage, "_save", starting)
    collect()

    assert set(served) == {max(served)}
    assert max(served) >= 2 * len(named(settings.STATIC_ROOT))


def test_a_changed_asset_gets_a_new_name_and_the_old_one_stays(assets, settings, tmp_path):
    collect()
    before = set(named(settings.STATIC_ROOT))
    (assets / "dot.svg").write_text("<svg><circle/></svg>")
    collect()
    after = set(named(settings.STATIC_ROOT))
    assert len(before & after) == len(before) - 2  # the dot, and the page that names it
    assert all(file.exists() for file in before | after)
    for file in named(settings.STATIC_ROOT):
        assert file.read_bytes()
        assert file.stat().st_mode & 0o777 == 0o644
    assert sorted(each.name for each in tmp_path.iterdir()) == ["source", "static"]


def test_a_write_that_fails_leaves_the_old_file_and_no_half_one(tmp_path):
    storage = HashedStaticFilesStorage(location=tmp_path / "static")
    storage.save("a.txt", ContentFile("old"))

    class Breaking(ContentFile):
        def chunks(self, _chunk_size=None):
            yield b"ne"
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        storage.save("a.txt", Breaking("new"))

    assert (tmp_path / "static" / "a.txt").read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["static"]


def test_saving_a_text_twice_replaces_it(tmp_path):
    storage = HashedStaticFilesStorage(location=tmp_path / "static")
    names = [storage.save("a.txt", ContentFile(text)) for text in ("old", "new")]
    assert names == ["a.txt", "a.txt"]
    assert (tmp_path / "static" / "a.txt").read_text() == "new"


def test_a_hashed_file_lies_beside_its_variants_which_are_made_once(assets, settings, monkeypatch):
    text = "a { color: red; }\n" * 200
    (assets / "long.css").write_text(text)
    collect()
    (name,) = settings.STATIC_ROOT.glob("long.*.css")
    assert gzip.decompress(Path(f"{name}.gz").read_bytes()) == name.read_bytes()
    assert brotli.decompress(Path(f"{name}.br").read_bytes()) == name.read_bytes()
    assert Path(f"{name}.br").stat().st_mode & 0o777 == 0o644
    made = []
    monkeypatch.setattr(brotli, "compress", lambda data, **_options: made.append(data) or data)
    collect()
    assert made == []


def test_a_file_that_is_small_or_compressed_already_gets_none(assets, settings):
    (assets / "noise.woff2").write_bytes(os.urandom(5000))
    collect()
    assert list(settings.STATIC_ROOT.rglob("noise*.woff2"))
    assert not [*settings.STATIC_ROOT.rglob("*.br"), *settings.STATIC_ROOT.rglob("*.gz")]
