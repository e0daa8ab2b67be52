"""Management commands, and the settings and schema that the site starts with or refuses."""

import asyncio
import io
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing, nullcontext
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command, get_commands
from django.db import OperationalError, connection
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.recorder import MigrationRecorder
from django.test import Client
from django.urls import reverse

from runners.jobspec import DrillSpec
from tests.stack import ROOT, copy_migrated, free_port
from tests.webapp.conftest import client_of, make_job
from webapp import asgi
from webapp.accounts.models import Team
from webapp.boot import cli
from webapp.boot.console import Problem
from webapp.core import queries, site_settings
from webapp.core.problems import InvalidProblem
from webapp.core.queries import SchemaError
from webapp.core.site_settings import (
    YEAR_SECONDS,
    DataFolderError,
    EmailUrlError,
    PublicUrlError,
    allowed_hosts,
    data_path,
    email_settings,
    flag,
    public_hosts,
    public_site,
    secret_key,
)
from webapp.core.time_zones import time_zone
from webapp.hosts.models import EnrolmentToken
from webapp.hosts.services import digest
from webapp.jobs.models import Job
from webapp.operations.management.commands import doctor
from webapp.operations.management.commands.bench import BENCHES

# The management commands: what they print, what they refuse, that they can be repeated.


def said(*arguments: str, **options) -> str:
    out = io.StringIO()
    call_command(*arguments, stdout=out, **options)
    return out.getvalue()


@pytest.mark.django_db
def test_the_first_admin_gets_a_password_that_works_and_is_said_once(client):
    lines = dict(line.split(": ") for line in said("ensure_admin").splitlines())
    assert client.login(username=lines["user"], password=lines["password"])
    assert client.get("/")["Location"] == "/settings/password/"
    said("ensure_admin")
    assert said("ensure_admin") == ""
    assert User.objects.count() == 1


@pytest.mark.django_db
def test_a_token_is_printed_alone_and_stored_nowhere(team):
    text = said("enrol_token", "--name", "Box")
    assert len(text.split()) == 1
    assert EnrolmentToken.objects.get(token_hash=digest(text.strip())).name == "Box"
    row = EnrolmentToken.objects.values().get()
    assert all(text.strip() not in str(value) for value in row.values())


@pytest.mark.django_db
def test_a_token_can_be_for_a_team_by_name_and_a_racks_come_a_line_each(team, other_team):
    said("enrol_token", "--team", other_team.name)
    assert EnrolmentToken.objects.get().team == other_team
    EnrolmentToken.objects.all().delete()
    texts = said("enrol_token", "--count", "3", "--pool", "rack").splitlines()
    assert len(set(texts)) == 3
    assert set(EnrolmentToken.objects.values_list("pool", flat=True)) == {"rack"}


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--team", "Nobody's"], 'no team "Nobody\'s"'),
        ([], "Run `python3 manage.py ensure_admin`"),
    ],
)
def test_a_token_without_a_team_says_the_way_out(arguments, words):
    Team.objects.all().delete()
    with pytest.raises(CommandError, match=words):
        said("enrol_token", *arguments)


@pytest.mark.django_db
def test_the_doctor_says_one_line_a_topic(monkeypatch):
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "TMPDIR"):  # a line each, where it is set
        monkeypatch.delenv(name, raising=False)
    lines = said("doctor").splitlines()
    topics = [line.split()[1] for line in lines]
    assert topics == [
        "Python", "torch", "Disk", "Memory", "Redis", "Database", "GPU", "Addresses", "Time",
        "Chromium",
    ]  # fmt: skip
    assert {line[0] for line in lines} <= {"✓", "✗"}


def test_the_doctor_says_that_a_broker_does_not_answer_and_hides_its_password(monkeypatch):
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
    found = next(one for one in doctor.findings() if one.topic == "Redis")
    assert not found.is_well
    assert "127.0.0.1" in found.words
    monkeypatch.setenv("REDIS_URL", "redis://:secret@127.0.0.1:1/0")
    found = next(one for one in doctor.findings() if one.topic == "Redis")
    assert "secret" not in found.words


def test_the_doctor_says_that_a_disk_is_too_small(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "NEEDED_BYTES", 2**62)
    assert not doctor._disk(tmp_path).is_well


def test_the_doctor_works_where_torch_is_not_installed(monkeypatch):
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", version)
    assert "✓ torch        not installed (not needed by the server" in said("doctor")


def test_what_a_command_writes_is_for_its_user_alone(monkeypatch):
    seen = []
    management = SimpleNamespace(
        execute_from_command_line=lambda _: seen.append(os.umask(0o022)), setup=lambda: None
    )
    monkeypatch.setattr(cli.importlib, "import_module", lambda _: management)
    monkeypatch.setattr(cli.os, "chdir", lambda _: None)
    before = os.umask(0o022)
    try:
        assert cli.main(["doctor"]) == 0
    finally:
        os.umask(before)
    assert seen == [0o077]


def test_the_bench_of_estimates_is_json_with_units_and_one_that_is_none_is_refused():
    figures = json.loads(said("bench", "estimate", "--json"))
    assert {figure["unit"] for figure in figures} == {"s", "1/s"}
    assert all(figure["value"] > 0 for figure in figures)
    with pytest.raises(CommandError, match="invalid choice: 'nothing'") as caught:
        said("bench", "nothing")
    assert all(name in str(caught.value) for name in BENCHES)


# ``manage.py drill``: only where drills are allowed, with words for whatever is wrong.


def drilled(*arguments: str) -> list[str]:
    out = io.StringIO()
    call_command("drill", *arguments, stdout=out)
    return out.getvalue().split()


@pytest.fixture
def allowing(settings) -> None:
    settings.ALLOWS_DRILLS = True


def test_drills_are_queued_for_the_host_and_their_ids_printed(allowing, host, olga):
    ids = drilled(host.slug, "--count", "2", "--steps", "3", "--ending", "oom_gpu")
    specs = [Job.objects.get(pk=pk).spec for pk in ids]
    assert [(spec["steps"], spec["ending"]) for spec in specs] == [(3, "oom_gpu")] * 2


def test_a_server_that_allows_none_says_how_to(host, olga):
    with pytest.raises(CommandError, match="SLIPWAY_DRILLS=1"):
        drilled(host.slug)
    assert not Job.objects.exists()


def test_nobody_gets_a_drill_past_the_setting(team, alice, host):
    with pytest.raises(InvalidProblem, match="runs no drills"):
        make_job(team, alice, host, spec=DrillSpec())


def test_what_no_drill_can_be_is_refused_in_words(allowing, host, olga):
    with pytest.raises(CommandError, match="no host 'elsewhere'"):
        drilled("elsewhere")
    with pytest.raises(CommandError, match=r"exit_code: .* less than or equal to 255"):
        drilled(host.slug, "--exit-code", "900")


def test_a_team_without_an_operator_is_told_so(allowing, host, alice):
    with pytest.raises(CommandError, match="has no operator"):
        drilled(host.slug)


def test_every_page_of_a_drill_can_be_read(allowing, team, alice, host):
    job = make_job(team, alice, host, spec=DrillSpec(), name="Rehearsal", model_name="")
    for page in ("detail", "metrics", "logs", "events", "config", "artefacts"):
        answer = client_of(alice).get(reverse(f"job-{page}", args=[job.pk]))
        assert answer.status_code == 200, page
        assert "Rehearsal" in answer.content.decode(), page


# A data folder or a key that cannot be used ends any part of the site with one sentence.


UVICORN = ["-m", "uvicorn", "webapp.asgi:application", "--port", "9"]


def test_a_key_is_made_once_for_its_owner_only(tmp_path):
    first = secret_key({}, tmp_path)
    assert secret_key({}, tmp_path) == first
    assert (tmp_path / "secret_key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secret_key"]


def test_a_key_that_could_not_be_written_leaves_no_empty_file(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(site_settings.os, "fsync", fail)
    with pytest.raises(DataFolderError, match="No space left"):
        secret_key({}, tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_an_empty_key_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "secret_key").touch()
    with pytest.raises(DataFolderError, match="Restore it from a backup"):
        secret_key({}, tmp_path)


@pytest.mark.parametrize("words", [["manage.py", "prepare"], UVICORN], ids=["command", "web"])
def test_every_part_ends_with_the_sentence_alone(tmp_path, words):
    (tmp_path / "secret_key").mkdir()
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "SLIPWAY_SECRET_KEY"}
        | {"SLIPWAY_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("The site's key")
    assert "cannot be read: Is a directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_data_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataFolderError, match="cannot be created: Not a directory"):
        site_settings.data_folder({"SLIPWAY_DATA_DIR": str(tmp_path / "file" / "data")}, tmp_path)


# One address becomes Django's settings of e-mail, or is refused in words.


SENDER = "slipway@example.org"


def test_the_scheme_says_how_mail_is_secured():
    assert email_settings("", "") == {}
    for url, port, starts_tls, is_tls in [
        ("smtp://mail.example.org", 25, False, False),
        ("smtp+tls://mail.example.org", 587, True, False),
        ("smtps://mail.example.org", 465, False, True),
        ("smtps://mail.example.org:2465", 2465, False, True),
    ]:
        found = email_settings(url, SENDER)
        assert found["EMAIL_HOST"] == "mail.example.org", url
        secured = (found["EMAIL_USE_TLS"], found["EMAIL_USE_SSL"])
        assert (found["EMAIL_PORT"], *secured) == (port, starts_tls, is_tls), url
    found = email_settings("smtps://me%40example.org:p%2Fw%3A@mail.example.org", SENDER)
    assert (found["EMAIL_HOST_USER"], found["EMAIL_HOST_PASSWORD"]) == ("me@example.org", "p/w:")


def test_what_is_no_address_is_refused_in_words():
    for url, sender, words in [
        ("mail.example.org", SENDER, "SLIPWAY_EMAIL_URL begins with ''"),
        ("http://mail.example.org", SENDER, "begins with 'http'"),
        ("smtp://", SENDER, "names the server None"),
        ("smtp://mail:port", SENDER, "SLIPWAY_EMAIL_URL cannot be read"),
        ("smtp://mail", "", "SLIPWAY_EMAIL_FROM is ''"),
    ]:
        with pytest.raises(EmailUrlError, match=words):
            email_settings(url, sender)


# A site that is named by its https address keeps to TLS; one on loopback does without.


SITE = "https://slipway.example.org"
ASK = """
import json, sys, django
django.setup()
from django.test import Client
client = Client(SERVER_NAME="slipway.example.org")
answers = [client.get(path) for path in sys.argv[1:]]
print(json.dumps([[answer.status_code, answer.headers.get("Location", "")] for answer in answers]))
"""


def python(tmp_path, *arguments: str, url: str = SITE) -> subprocess.CompletedProcess[str]:
    """Run this Python on a data folder of its own, as a site of that address."""
    environment = os.environ | {
        "SLIPWAY_DATA_DIR": str(tmp_path),
        "SLIPWAY_PUBLIC_URL": url,
        "DJANGO_SETTINGS_MODULE": "webapp.settings",
    }
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_djangos_own_check_for_production_finds_nothing(tmp_path):
    done = python(tmp_path, "manage.py", "check", "--deploy", "--fail-level", "WARNING")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_plain_request_goes_to_the_https_address_and_health_does_without_tls(tmp_path):
    done = python(tmp_path, "-c", ASK, "/accounts/login/?next=/", "/healthz")
    page, (status, location) = json.loads(done.stdout)
    assert page == [301, f"{SITE}/accounts/login/?next=/"]
    assert (status != 301, location) == (True, "")


def test_a_wrong_address_stops_the_start_with_the_way_out(tmp_path):
    done = python(tmp_path, "manage.py", "check", url="http://slipway.example.org")
    assert done.returncode != 0
    assert "SLIPWAY_PUBLIC_URL is 'http://slipway.example.org'" in done.stderr


def test_only_the_https_address_of_a_whole_site_will_do():
    for url in ["http://a.org", "a.org", "https://", "https://a.org/slipway", "ftp://a.org"]:
        with pytest.raises(PublicUrlError, match=r"https://slipway\.example\.org"):
            public_site(url)
    assert (public_site(""), public_hosts("")) == ({}, [])
    url = "https://slipway.example.org:8443/"
    assert public_site(url)["CSRF_TRUSTED_ORIGINS"] == ["https://slipway.example.org:8443"]
    assert public_hosts(url) == ["slipway.example.org"]


def test_addresses_are_taken_as_people_write_them_and_compared_as_browsers_send_them():
    for text, origin, host in [
        (f"{SITE} ", SITE, "slipway.example.org"),
        (" HTTPS://Slipway.Example.org:443/\n", SITE, "slipway.example.org"),
        ("https://bücher.example", "https://xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("https://[FD00::0:1]:8443", "https://[fd00::1]:8443", "[fd00::1]"),
    ]:
        site = public_site(text)
        assert (site["CSRF_TRUSTED_ORIGINS"], public_hosts(text)) == ([origin], [host]), text
        assert site["SECURE_SSL_HOST"] == origin.removeprefix("https://"), text
    for text, names in [
        ("slipway.lan, 10.0.0.5", ["slipway.lan", "10.0.0.5"]),
        ("\tslipway.lan\n10.0.0.5 ,", ["slipway.lan", "10.0.0.5"]),
        ("fd00::1,[FD00::2]:8000", ["[fd00::1]", "[fd00::2]"]),
        ("https://Slipway.LAN:8000/,10.0.0.5:8000", ["slipway.lan", "10.0.0.5"]),
        ("bücher.example.,*.lan,.example.org,*", [
            "xn--bcher-kva.example", ".lan", ".example.org", "*",
        ]),
        ("", []),
    ]:  # fmt: skip
        assert allowed_hosts(text) == names, text


def test_every_form_of_tz_starts_the_site_and_an_unknown_one_is_named():
    for text, zone in [
        ("", "UTC"),
        ("Europe/Berlin ", "Europe/Berlin"),
        (":Europe/Berlin", "Europe/Berlin"),
        ("europe/berlin", "Europe/Berlin"),
        ("America/New York", "America/New_York"),
        ("/usr/share/zoneinfo/Europe/Berlin", "Europe/Berlin"),
        ("EST5EDT", "EST5EDT"),
    ]:
        assert time_zone({"TZ": text}) == (zone, ""), text
    for text in ["CET-1CEST,M3.5.0,M10.5.0/3", "<+03>-3", "UTC+2", "/no/file", "../x", "Europe"]:
        name, words = time_zone({"TZ": text})
        assert name == "UTC", text
        assert words.startswith(f"TZ is {text!r}"), text


@pytest.mark.slow
def test_a_process_of_the_site_names_tz_and_runs_on(tmp_path, monkeypatch):
    for text, words in [("CET-1CEST,M3.5.0,M10.5.0/3", "TZ is 'CET"), (":/etc/localtime", "")]:
        monkeypatch.setenv("TZ", text)
        done = python(tmp_path, "manage.py", "check", "--tag", "models")
        assert (done.returncode, done.stderr.count("\n")) == (0, bool(words)), text
        assert words in done.stderr


def test_an_empty_or_home_relative_data_folder_is_read_as_the_shell_would(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for text, path in [("", ROOT / "var"), ("~/data ", tmp_path / "data")]:
        assert data_path({"SLIPWAY_DATA_DIR": text}, ROOT / "var") == path, text


def test_switches_take_the_words_for_yes_and_no():
    for text in ["1", "true", "YES ", "on"]:
        assert flag({"SLIPWAY_DRILLS": text}, "SLIPWAY_DRILLS"), text
    for text in ["", "0", "false", "No", "off"]:
        assert not flag({"SLIPWAY_DRILLS": text}, "SLIPWAY_DRILLS"), text


def test_a_database_address_that_cannot_be_read_is_named_without_its_password(
    tmp_path, monkeypatch
):
    for url in ["postgresql://user:se/cret@db/slipway", "mongo://db/slipway"]:
        monkeypatch.setenv("DATABASE_URL", url)
        done = python(tmp_path, "manage.py", "check")
        assert done.returncode != 0, url
        assert done.stderr.startswith("DATABASE_URL cannot be read"), url
        assert "cret" not in done.stderr


@pytest.fixture
def ask(settings, capsys):
    """A client of a site behind TLS, which returns the answer and the lines of the web log."""
    for name, value in public_site(SITE).items():
        setattr(settings, name, value)
    settings.ALLOWED_HOSTS = ["slipway.example.org"]

    def get(path: str, host: str, **headers):
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = Client(SERVER_NAME=host).get(path, headers=sent)
        return answer, capsys.readouterr().out

    return get


def test_a_name_that_is_not_the_sites_is_refused_with_the_cause_and_a_line(ask):
    for path in ["/login/", "/healthz", "/api/v1/hosts/enroll"]:
        answer, log = ask(path, "192.0.2.2")
        assert answer.status_code == 400, path
        for words in (answer.content.decode(), log):
            assert "192.0.2.2" in words, path
            assert "SLIPWAY_ALLOWED_HOSTS" in words, path
        assert ("code" in answer.content.decode()) == path.startswith("/api/"), path


def test_a_proxy_that_is_not_trusted_gets_a_sentence_instead_of_a_loop(ask):
    host = "slipway.example.org"
    for headers, status, answered, logged in [
        ({"X_Forwarded_Proto": "https"}, 400, "FORWARDED_ALLOW_IPS", "came from 127.0.0.1"),
        ({"X_Forwarded_Proto": "https, http"}, 400, "is 'https, http'", "'https, http'"),
        ({"X_Forwarded_Proto": "http"}, 301, "", ""),
        ({"X_Forwarded_For": "203.0.113.4"}, 301, "", "without X-Forwarded-Proto"),
        ({}, 301, "", ""),
    ]:
        answer, log = ask("/login/", host, **headers)
        assert answer.status_code == status, headers
        assert answered in answer.content.decode(), headers
        assert (logged in log, bool(log)) == (True, bool(logged)), headers
    answer, log = ask("/healthz", host, X_Forwarded_Proto="https")
    assert (answer.status_code, log) == (200, "")


def test_cookies_are_bound_to_the_host_and_to_tls_for_a_year(settings):
    site = public_site(SITE)
    assert site["SESSION_COOKIE_SECURE"]
    assert settings.CSRF_USE_SESSIONS  # so there is no other cookie
    assert site["SESSION_COOKIE_NAME"].startswith("__Host-")
    assert public_site(SITE)["SECURE_HSTS_SECONDS"] == YEAR_SECONDS == 365 * 24 * 3600


# Code that meets the schema of a newer version starts nothing and says both versions.


SLOWER_ENTRANCES = [
    ["manage.py", "control"],
    ["manage.py", "ticker"],
    ["manage.py", "prepare"],
    ["-m", "uvicorn", "webapp.asgi:application", "--port"],
]


@pytest.fixture
def newer(db) -> None:
    """A migration of the future in the database of the test."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO django_migrations (app, name, applied) VALUES "
            "('hosts', '9999_future', CURRENT_TIMESTAMP), ('later', '0001_new', CURRENT_TIMESTAMP)"
        )


@pytest.mark.django_db(databases=["default", "metrics"])
def test_only_a_migration_that_this_version_does_not_know_is_newer():
    queries.check_schema()
    assert queries.newer_migrations({"hosts": ["0001_initial", "0002_control"]}) == []
    assert queries.newer_migrations({"hosts": ["9999_one"]}) == ["hosts.9999_one"]


@pytest.mark.parametrize(
    ("dropped", "missing"),
    [
        ({"jobs": []}, []),
        ({"jobs": None}, []),  # an app that the database does not have yet
        ({"jobs": ["0004_queue"]}, ["jobs.0004_queue"]),
        (
            {"accounts": ["0002_quota", "0008_login_tries"], "jobs": ["0019_stored_files"]},
            ["accounts.0008_login_tries", "jobs.0019_stored_files"],
        ),
    ],
)
def test_a_database_of_before_the_first_release_needs_every_step_of_its_apps(dropped, missing):
    applied = {app: ["0001_initial", *old] for app, old in queries.replaced_migrations().items()}
    for app, names in dropped.items():
        applied[app] = [] if names is None else [n for n in applied[app] if n not in names]

    assert queries.missing_migrations(applied) == missing

    with pytest.raises(SchemaError, match=missing[-1]) if missing else nullcontext():
        queries.check_migrations(applied, "The database")


@pytest.mark.django_db(databases=["default", "metrics"])
def test_a_database_that_took_every_replaced_migration_has_nothing_to_take():
    MigrationRecorder(connection).migration_qs.filter(app="audit", name="0001_initial").delete()
    queries.check_schema()
    executor = MigrationExecutor(connection)

    assert executor.migration_plan(executor.loader.graph.leaf_nodes()) == []


def test_a_newer_schema_is_refused_with_both_versions_but_what_helps_out_runs(newer, capsys):
    with pytest.raises(SchemaError) as refusal:
        queries.check_schema()
    last = queries.known_migrations()["hosts"][-1]
    assert "hosts.9999_future, later.0001_new" in str(refusal.value)
    assert f"this is Slipway 0.1.0, which knows hosts.{last}, no later" in str(refusal.value)
    assert "Start the newer version" in str(refusal.value)
    for command in sorted({*get_commands()} - cli.WITHOUT_SCHEMA):
        with pytest.raises(Problem, match=r"hosts\.9999_future"):
            cli._django([command])
    for command in ["backup", "restore", "doctor"]:
        with pytest.raises(SystemExit):
            cli._django([command, "--help"])
        assert f"manage.py {command}" in capsys.readouterr().out, command


def lifespan() -> list[dict]:
    """What the web process answers to a server that starts it."""
    sent = []

    async def drive() -> None:
        asked = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

        async def receive() -> dict:
            return next(asked)

        async def send(message: dict) -> None:
            sent.append(message)

        await asgi.application({"type": "lifespan"}, receive, send)

    asyncio.run(drive())
    return sent


def test_the_web_process_does_not_start_on_a_newer_schema(monkeypatch):
    def refuse() -> None:
        raise SchemaError("newer")

    monkeypatch.setattr(asgi, "check_schema", refuse)

    assert lifespan() == [{"type": "lifespan.startup.failed", "message": "newer"}]


def test_the_web_process_starts_while_the_database_is_away(monkeypatch):
    def fail() -> None:
        raise OperationalError("away")

    monkeypatch.setattr(asgi, "check_schema", fail)

    assert next(message["type"] for message in lifespan()) == "lifespan.startup.complete"


@pytest.fixture(scope="module")
def future_site(tmp_path_factory):
    """A data folder that a newer version has migrated."""
    data = tmp_path_factory.mktemp("future")
    copy_migrated(data)
    with closing(sqlite3.connect(data / "slipway.sqlite3")) as rows, rows:
        rows.execute(
            "CREATE TABLE IF NOT EXISTS django_migrations "
            "(id integer PRIMARY KEY, app text, name text, applied text)"
        )
        rows.execute(
            "INSERT INTO django_migrations (app, name, applied) VALUES ('jobs', '9999_x', '2030-01-01')"
        )
    return data


@pytest.mark.parametrize(
    "words",
    [
        ["manage.py", "up", "--port"],
        *(pytest.param(one, marks=pytest.mark.slow) for one in SLOWER_ENTRANCES),
    ],
    ids=lambda words: words[-2] + words[-1],
)
def test_every_entrance_refuses_in_words(future_site, words):
    port = [str(free_port())] if words[-1] == "--port" else []
    done = subprocess.run(
        [sys.executable, *words, *port],
        cwd=ROOT,
        env=os.environ | {"SLIPWAY_DATA_DIR": str(future_site)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode != 0
    assert "has the schema of a newer version (jobs.9999_x)" in done.stderr
    assert "which knows jobs.00" in done.stderr
    assert "Traceback" not in done.stderr
