"""The administration's site: who enters, what it lists, and the last administrator."""

import threading
from datetime import timedelta

import pytest
import time_machine
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import Group, Permission, User
from django.db import connection, transaction
from django.urls import reverse

from tests.webapp.conftest import EXIT_OK, batch_of, client_of
from webapp.accounts.initial_passwords import initial_password_mark
from webapp.accounts.models import Membership, Role, Team
from webapp.accounts.services import administrators
from webapp.agents.ingest import events_accept
from webapp.audit.models import Event
from webapp.core.clock import now
from webapp.core.problems import ConflictProblem
from webapp.hosts.models import EnrolmentToken, Host
from webapp.hosts.services import digest
from webapp.jobs.models import AttemptEvent

# The Django admin: everything to see, little to change.


pytestmark = pytest.mark.django_db(databases="__all__")
READ_ONLY = [
    *("audit_event", "jobs_job", "jobs_attempt", "jobs_attemptevent", "jobs_command"),
    *("jobs_artefact", "jobs_measurement"),
]
OURS = [model for model in admin.site._registry if model.__module__.startswith("webapp.")]


@pytest.fixture
def as_root(admin_user):
    return client_of(admin_user)


def test_every_table_of_a_person_or_a_job_is_registered():
    hidden = {"metricbatch", "metricchunk", "secret", "earliersecret"}
    hidden |= {
        "hostmodel",
        "repositoryuse",
        "gatewayload",
    }  # reports of hosts and of jobs, made anew each time
    models = {m for m in apps.get_models() if m.__module__.startswith("webapp.")}
    assert {m._meta.model_name for m in models - set(OURS)} == hidden


def test_every_list_opens_and_what_happened_is_neither_added_nor_deleted(as_root, attempt):
    events_accept(host=attempt.host, batch=batch_of(attempt, ("exited", EXIT_OK)))
    names = [f"admin:{m._meta.app_label}_{m._meta.model_name}_changelist" for m in OURS]
    assert {name: as_root.get(reverse(name)).status_code for name in names} == dict.fromkeys(
        names, 200
    )
    row = AttemptEvent.objects.get()
    assert as_root.get(reverse("admin:jobs_attemptevent_change", args=[row.pk])).status_code == 200
    assert (
        as_root.post(reverse("admin:jobs_attemptevent_delete", args=[row.pk])).status_code == 403
    )
    for name in READ_ONLY:
        assert as_root.get(reverse(f"admin:{name}_add")).status_code == 403, name


def test_adding_a_host_leads_to_the_check_list_and_its_page_shows_no_secret(as_root, enrolled):
    answer = as_root.get(reverse("admin:hosts_host_add"))
    assert answer.headers["Location"] == reverse("host-add")
    host, _ = enrolled
    text = as_root.get(reverse("admin:hosts_host_change", args=[host.pk])).content.decode()
    assert host.credential_hash not in text
    assert host.command_salt not in text


def test_the_new_tokens_text_is_shown_once_enrols_and_can_be_revoked(as_root, team):
    form = {"team": team.pk, "name": "Box", "pool": "default", "labels": "{}"}
    answer = as_root.post(reverse("admin:hosts_enrolmenttoken_add"), form, follow=True)
    words = next(str(m) for m in answer.context["messages"] if "--token" in str(m))
    text = words.split("--token ")[1].strip()
    assert EnrolmentToken.objects.get().token_hash == digest(text)
    chosen = {"action": "revoke", "_selected_action": EnrolmentToken.objects.get().pk}
    as_root.post(reverse("admin:hosts_enrolmenttoken_changelist"), chosen)
    assert EnrolmentToken.objects.get().revoked_at is not None


def test_a_state_set_here_is_recorded(as_root, host):
    form = {"name": "Box", "pool": host.pool_id, "labels": "{}", "state": "maintenance"}
    as_root.post(reverse("admin:hosts_host_change", args=[host.pk]), form)
    assert Host.objects.get().state == "maintenance"
    assert Event.objects.filter(kind="host.state").last().to_state == "maintenance"


def test_a_name_that_folds_to_one_that_exists_is_refused(as_root, alice):
    """By case and by Unicode's compatible forms; a name with an accent is another one."""
    for name, is_taken in (
        ("alice", True), ("Alice", True), ("ALICE", True), ("\uff21\uff4c\uff49\uff43\uff45", True),
        ("al\u00edce", False), ("ali\u0301ce", True),  # decomposed, as the one before it
    ):  # fmt: skip
        words = {"username": name, "usable_password": "true"}
        words |= dict.fromkeys(("password1", "password2"), "Greek-letters-9-of-them")
        as_root.post(reverse("admin:auth_user_add"), words)
        assert User.objects.filter(username__iexact=name).exists() or is_taken, name
        assert User.objects.count() == (2 if is_taken and "\u0301" not in name else 3), name


def test_only_staff_gets_in(alice, olga):
    assert client_of(alice).get("/admin/").status_code == 302
    assert client_of(olga).get("/admin/login/?next=/admin/").status_code == 403


# The administration: a password shown lately, and a row for every write.


PASSWORD = "correct horse battery"


@pytest.fixture
def superuser(db) -> User:
    return User.objects.create_superuser("root", password=PASSWORD)


def test_a_session_that_was_left_open_opens_the_administration_by_the_password_alone(superuser):
    client = client_of(superuser)
    with time_machine.travel(now() + timedelta(minutes=16)):
        answer = client.get("/admin/")
        assert answer.headers["Location"].startswith("/admin/login/")
        assert client.get("/settings/sessions/").status_code == 200
    with time_machine.travel(now() + timedelta(minutes=16)):
        client.post("/admin/accounts/team/add/", {"name": "New team"})
    assert not Team.objects.exists()
    with time_machine.travel(now() + timedelta(minutes=16)):
        page = client.get("/admin/login/?next=/admin/").content.decode()
        assert "Enter your password again" in page
        assert 'value="root"' in page
        sent = {"username": "root", "password": PASSWORD, "next": "/admin/"}
        assert client.post("/admin/login/?next=/admin/", sent).headers["Location"] == "/admin/"
        assert client.get("/admin/").status_code == 200


def test_a_clock_that_was_set_back_leaves_no_administration_open(superuser):
    with time_machine.travel(now() + timedelta(hours=1)):
        client = client_of(superuser)
        assert client.get("/admin/").status_code == 200
    assert client.get("/admin/").headers["Location"].startswith("/admin/login/")


def test_a_write_leaves_who_where_and_which_fields_but_no_value(superuser):
    client_of(superuser).get("/admin/accounts/team/")
    assert not Event.objects.exists()
    client_of(superuser).post("/admin/accounts/team/add/", {"name": ""})
    assert not Event.objects.filter(kind="admin.write").exists()
    sent = {"name": "New team", "memberships-TOTAL_FORMS": 0, "memberships-INITIAL_FORMS": 0}
    client_of(superuser).post("/admin/accounts/team/add/", sent)
    event = Event.objects.get(kind="admin.write")
    assert (event.actor, event.detail["path"]) == ("root", "/admin/accounts/team/add/")
    assert "name" in event.detail["fields"]
    assert "New team" not in repr(event.detail)


def test_a_password_is_changed_on_the_products_own_page(superuser):
    answer = client_of(superuser).get("/admin/password_change/")
    assert answer.headers["Location"] == "/settings/password/"


# The last administrator stays, and nobody raises themselves.


@pytest.fixture
def root(db) -> User:
    return User.objects.create_superuser("root")


@pytest.fixture
def clerk(db) -> User:
    """Somebody who may change accounts and roles in the administration, but is no superuser."""
    user = User.objects.create_user("clerk", is_staff=True)
    wanted = ["change_user", "delete_user", "add_membership", "change_membership", "change_team"]
    user.user_permissions.set(Permission.objects.filter(codename__in=wanted))
    return user


def account(user: User, **changes) -> dict:
    """Return what the form of an account sends."""
    sent = {"username": user.username, "is_active": "on", "is_staff": "on", "is_superuser": "on"}
    sent |= {"date_joined_0": "2026-01-01", "date_joined_1": "00:00:00", **changes}
    return {name: value for name, value in sent.items() if value is not None}


def role(membership: Membership, role: Role) -> dict:
    return {"user": membership.user_id, "team": membership.team_id, "role": role}


def save(user: User, model: str, key: int, sent: dict):
    """Send a form of the administration and return the answer."""
    return client_of(user).post(f"/admin/{model}/{key}/change/", sent)


# The last administrator


def test_the_last_administrator_is_not_demoted_or_closed_by_code_or_form(root):
    for flag in ("is_superuser", "is_staff", "is_active"):
        setattr(root, flag, False)
        with pytest.raises(ConflictProblem, match="last account that can open"):
            root.save()
        root.refresh_from_db()
        assert administrators().get() == root, flag
        page = save(root, "auth/user", root.pk, account(root, **{flag: None}))
        assert "Create another superuser first" in page.content.decode(), flag
        assert administrators().get() == root, flag


def test_the_last_administrator_is_not_deleted_but_may_change_a_name(root):
    with pytest.raises(ConflictProblem), transaction.atomic():
        root.delete()
    answer = client_of(root).post(f"/admin/auth/user/{root.pk}/delete/", {"post": "yes"})
    assert answer.status_code == 403
    assert administrators().get() == root
    assert save(root, "auth/user", root.pk, account(root, first_name="Ada")).status_code == 302
    assert User.objects.get().first_name == "Ada"


def test_all_administrators_are_not_deleted_at_once(root):
    User.objects.create_superuser("second")
    everybody = list(User.objects.values_list("pk", flat=True))
    sent = {"action": "delete_selected", "_selected_action": everybody, "post": "yes"}
    answer = client_of(root).post("/admin/auth/user/", sent, follow=True)
    assert "last account that can open" in answer.content.decode()
    assert administrators().count() == 2


def test_a_closed_superuser_does_not_count_as_another(root):
    User.objects.create_superuser("away", is_active=False)
    with pytest.raises(ConflictProblem):
        root.delete()


def test_one_of_two_administrators_may_go(root):
    second = User.objects.create_superuser("second")
    save(second, "auth/user", root.pk, account(root, is_active=None))
    assert administrators().get() == second


def test_an_account_that_is_logged_in_with_an_initial_password_can_be_deleted(root, alice):
    initial_password_mark(alice)
    client_of(alice)
    client_of(root).post(f"/admin/auth/user/{alice.pk}/delete/", {"post": "yes"})
    assert list(User.objects.all()) == [root]


@pytest.mark.django_db(transaction=True, databases="__all__")
def test_two_who_close_each_other_at_once_do_not_both_succeed(transactional_db):
    pair = [User.objects.create_superuser(name) for name in ("one", "two")]
    begin = threading.Barrier(2)

    def close(user: User) -> None:
        begin.wait()
        try:
            with transaction.atomic():
                user.is_active = False
                user.save()
        except ConflictProblem:
            pass
        finally:
            connection.close()

    threads = [threading.Thread(target=close, args=[user]) for user in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert administrators().count() == 1


# Raising oneself


@pytest.fixture
def clerks(clerk, team) -> Membership:
    return Membership.objects.create(user=clerk, team=team, role=Role.VIEWER)


def test_nobody_raises_the_role_they_hold(clerk, clerks, team, other_team):
    page = save(clerk, "accounts/membership", clerks.pk, role(clerks, Role.ADMIN))
    assert "You cannot raise your own role" in page.content.decode()
    assert Membership.objects.get().role == Role.VIEWER
    row = {"id": clerks.pk, "team": team.pk, "user": clerk.pk, "role": "admin"}
    sent = {"name": team.name, "memberships-TOTAL_FORMS": 1, "memberships-INITIAL_FORMS": 1}
    sent |= {f"memberships-0-{name}": value for name, value in row.items()}
    page = save(clerk, "accounts/team", team.pk, sent)
    assert "You cannot raise your own role" in page.content.decode()
    assert Membership.objects.get().role == Role.VIEWER
    Membership.objects.filter(pk=clerks.pk).update(role=Role.ADMIN)
    sent = {**role(clerks, Role.ADMIN), "team": other_team.pk}
    save(clerk, "accounts/membership", clerks.pk, sent)
    assert not Membership.objects.filter(user=clerk, team=other_team).exists()


def test_nor_a_superuser(root, team):
    own = Membership.objects.create(user=root, team=team, role=Role.VIEWER)
    save(root, "accounts/membership", own.pk, role(own, Role.ADMIN))
    assert Membership.objects.get().role == Role.VIEWER


def test_anothers_role_is_not_made_ones_own(clerk, bob):
    theirs = Membership.objects.get(user=bob)
    Membership.objects.filter(pk=theirs.pk).update(role=Role.ADMIN)
    sent = {**role(theirs, Role.ADMIN), "user": clerk.pk}
    save(clerk, "accounts/membership", theirs.pk, sent)
    assert not Membership.objects.filter(user=clerk).exists()


def test_nobody_joins_a_team_by_themselves_but_a_superuser(clerk, root, team):
    for user in (clerk, root):
        sent = {"user": user.pk, "team": team.pk, "role": "admin"}
        client_of(user).post("/admin/accounts/membership/add/", sent)
    assert [row.user for row in Membership.objects.all()] == [root]


def test_others_are_raised_and_oneself_lowered(root, clerk, clerks, team):
    save(root, "accounts/membership", clerks.pk, role(clerks, Role.ADMIN))
    assert Membership.objects.get().role == Role.ADMIN
    own = Membership.objects.create(user=root, team=team, role=Role.ADMIN)
    save(root, "accounts/membership", own.pk, role(own, Role.VIEWER))
    assert Membership.objects.get(pk=own.pk).role == Role.VIEWER


def test_a_clerk_gives_nobody_rights(clerk, alice):
    save(clerk, "auth/user", alice.pk, account(alice, user_permissions=["1"]))
    save(clerk, "auth/user", clerk.pk, account(clerk))
    assert not User.objects.filter(is_superuser=True).exists()
    assert not User.objects.get(pk=alice.pk).is_staff


def test_a_clerk_neither_deletes_a_superuser_nor_sets_the_password(clerk, root):
    User.objects.create_superuser("second")
    sent = {"password1": "a-long-new-password", "password2": "a-long-new-password"}
    client, address = client_of(clerk), f"/admin/auth/user/{root.pk}"
    assert client.post(f"{address}/password/", sent).status_code == 403
    assert client.post(f"{address}/delete/", {"post": "yes"}).status_code == 403


def test_nobody_gives_rights_to_their_own_account(root):
    other = User.objects.create_superuser("second")
    client = client_of(root)
    User.objects.filter(pk=root.pk).update(is_superuser=False)
    client.post(f"/admin/auth/user/{root.pk}/change/", account(root))
    assert administrators().get() == other


def test_a_key_that_no_row_can_have_is_refused_by_words_and_never_a_server_error(
    as_root, admin_user, team
):
    member = Membership.objects.create(team=team, user=admin_user, role=Role.ADMIN)
    users, groups = reverse("admin:auth_user_changelist"), reverse("admin:auth_group_add")
    change = reverse("admin:accounts_membership_change", args=[member.pk])
    of_team = reverse("admin:accounts_team_change", args=[team.pk])
    rows = {"membership_set-TOTAL_FORMS": "1", "membership_set-INITIAL_FORMS": "0"}
    for key in (
        "' OR 1=1 --",
        "9223372036854775808",
        "-9223372036854775809",
        "9" * 400,
        "9" * 5000,
    ):
        sent = {
            users: {"action": "password_link", "_selected_action": key},
            f"{users}?": {"action": "delete_selected", "_selected_action": [admin_user.pk, key]},
            groups: {"name": "G", "permissions": key},
            change: {"user": key, "team": team.pk, "role": "admin"},
            of_team: {"name": "T", **rows, "membership_set-0-user": key},
        }
        for address, form in sent.items():
            answer = as_root.post(address, form, follow=True)
            assert answer.status_code == 200, (address, key[:30])
            if key.startswith("'") and address.startswith(users):
                assert "is no key of users" in answer.content.decode()
        for address in (f"{change}?user={key}", f"{users}?id__in={key}", f"{users}?id={key}"):
            assert as_root.get(address, follow=True).status_code in {200, 404}, (address, key[:30])
    assert User.objects.filter(pk=admin_user.pk).exists()
    assert not Group.objects.exists()
