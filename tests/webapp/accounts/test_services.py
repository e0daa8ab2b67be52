"""The first account, and the commands that make it and a host's token."""

from io import StringIO

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command

from webapp.accounts.models import Membership, Role, Team
from webapp.accounts.services import admin_ensure, member_add, team_create
from webapp.hosts.models import EnrolmentToken
from webapp.hosts.services import digest

pytestmark = pytest.mark.django_db


def run(*arguments: str) -> str:
    out = StringIO()
    call_command(*arguments, stdout=out)
    return out.getvalue()


def test_the_first_admin_leads_the_home_team():
    admin_ensure()
    membership = Membership.objects.get()
    assert (membership.user.username, membership.team.name) == ("admin", "Home team")
    assert membership.role == Role.ADMIN


def test_the_printed_password_logs_in(client):
    lines = run("ensure_admin").splitlines()
    password = lines[1].removeprefix("password: ")
    assert client.login(username="admin", password=password)


def test_there_is_only_one_first_admin():
    run("ensure_admin")
    assert run("ensure_admin") == ""
    assert User.objects.count() == 1


def test_passwords_differ_between_installations():
    first = admin_ensure()
    User.objects.update(is_superuser=False, username="former")
    assert admin_ensure() != first


def test_a_team_of_a_name_exists_once():
    assert team_create(name="A") == team_create(name="A")


def test_adding_a_member_again_changes_the_role(team, alice):
    member_add(team=team, user=alice, role=Role.OPERATOR)
    assert Membership.objects.get(user=alice).role == Role.OPERATOR


def test_a_token_is_printed_alone(team):
    text = run("enrol_token", "--name", "Box").strip()
    assert EnrolmentToken.objects.get(token_hash=digest(text)).name == "Box"


def test_a_token_can_be_for_a_named_team(team, other_team):
    run("enrol_token", "--team", other_team.name)
    assert EnrolmentToken.objects.get().team == other_team


def test_a_token_for_a_team_that_is_not_there_is_refused(team):
    with pytest.raises(CommandError, match="no team 'Nobody'"):
        run("enrol_token", "--team", "Nobody")


def test_without_any_team_the_way_out_is_named():
    assert not Team.objects.exists()
    with pytest.raises(CommandError, match="ensure_admin"):
        run("enrol_token")
