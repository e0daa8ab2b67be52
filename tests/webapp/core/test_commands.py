"""The management commands: what they print, what they refuse, that they can be repeated."""

import io
import json

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command

from webapp.accounts.models import Team
from webapp.core.management.commands import doctor
from webapp.core.management.commands.bench import BENCHES
from webapp.hosts.models import EnrolmentToken


def said(*arguments: str, **options) -> str:
    out = io.StringIO()
    call_command(*arguments, stdout=out, **options)
    return out.getvalue()


@pytest.mark.django_db
def test_the_first_admin_gets_a_password_that_works(client):
    lines = dict(line.split(": ") for line in said("ensure_admin").splitlines())

    assert client.login(username=lines["user"], password=lines["password"])


@pytest.mark.django_db
def test_the_password_is_said_once():
    said("ensure_admin")

    assert said("ensure_admin") == ""
    assert User.objects.count() == 1


@pytest.mark.django_db
def test_a_token_is_printed_alone(team):
    text = said("enrol_token", "--name", "Box")

    assert len(text.split()) == 1
    assert EnrolmentToken.objects.count() == 1


@pytest.mark.django_db
def test_two_tokens_are_two(team):
    assert said("enrol_token") != said("enrol_token")


@pytest.mark.django_db
def test_a_racks_tokens_come_a_line_each(team):
    texts = said("enrol_token", "--count", "3", "--pool", "rack").splitlines()

    assert len(set(texts)) == 3
    assert set(EnrolmentToken.objects.values_list("pool", flat=True)) == {"rack"}


@pytest.mark.django_db
def test_the_text_of_a_token_is_stored_nowhere(team):
    text = said("enrol_token").strip()
    row = EnrolmentToken.objects.values().get()

    assert all(text not in str(value) for value in row.values())


@pytest.mark.django_db
def test_a_token_can_be_for_a_team_by_name(team, other_team):
    said("enrol_token", "--team", other_team.name)

    assert EnrolmentToken.objects.get().team == other_team


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
def test_the_doctor_says_one_line_a_topic():
    lines = said("doctor").splitlines()
    topics = [line.split()[1] for line in lines]

    assert topics == [
        "Python",
        "torch",
        "Disk",
        "Memory",
        "Redis",
        "Database",
        "GPU",
        "Chromium",
    ]
    assert {line[0] for line in lines} <= {"✓", "✗"}


def test_the_doctor_says_that_a_broker_does_not_answer(monkeypatch):
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")

    found = next(one for one in doctor.findings() if one.topic == "Redis")

    assert not found.is_well
    assert "127.0.0.1" in found.words


def test_the_doctor_hides_the_password_of_a_broker(monkeypatch):
    monkeypatch.setenv("REDIS_URL", "redis://:secret@127.0.0.1:1/0")

    found = next(one for one in doctor.findings() if one.topic == "Redis")

    assert "secret" not in found.words


def test_the_doctor_says_that_a_disk_is_too_small(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "NEEDED_BYTES", 2**62)

    assert not doctor._disk(tmp_path).is_well


def test_the_bench_of_estimates_is_json_with_units():
    figures = json.loads(said("bench", "estimate", "--json"))

    assert {figure["unit"] for figure in figures} == {"s", "1/s"}
    assert all(figure["value"] > 0 for figure in figures)


def test_a_bench_that_is_none_is_refused_with_the_names():
    with pytest.raises(CommandError) as caught:
        said("bench", "nothing")
    assert all(name in str(caught.value) for name in BENCHES)


def test_the_vendored_files_are_those_of_the_lock():
    assert "Every vendored file" in said("vendor", "--check")
