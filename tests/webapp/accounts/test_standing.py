"""The last administrator stays, and nobody raises themselves."""

import threading

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection, transaction

from tests.webapp.conftest import client_of
from webapp.accounts.models import Membership, Role
from webapp.accounts.services import administrators
from webapp.core.problems import ConflictProblem

pytestmark = pytest.mark.django_db(databases="__all__")


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


@pytest.mark.parametrize("flag", ["is_superuser", "is_staff", "is_active"])
def test_the_last_administrator_is_not_demoted_or_closed_by_any_code(root, flag):
    setattr(root, flag, False)
    with pytest.raises(ConflictProblem, match="last account that can open"):
        root.save()
    assert administrators().get() == root


@pytest.mark.parametrize("flag", ["is_superuser", "is_staff", "is_active"])
def test_nor_through_the_form_which_says_why(root, flag):
    page = save(root, "auth/user", root.pk, account(root, **{flag: None}))
    assert "Make another superuser first" in page.content.decode()
    assert administrators().get() == root


def test_the_last_administrator_is_not_deleted(root):
    with pytest.raises(ConflictProblem), transaction.atomic():
        root.delete()
    answer = client_of(root).post(f"/admin/auth/user/{root.pk}/delete/", {"post": "yes"})
    assert answer.status_code == 403
    assert administrators().get() == root


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


def test_an_account_that_is_logged_in_somewhere_can_be_deleted(root, alice):
    client_of(alice)
    client_of(root).post(f"/admin/auth/user/{alice.pk}/delete/", {"post": "yes"})
    assert list(User.objects.all()) == [root]


def test_the_last_administrator_may_change_a_name(root):
    assert save(root, "auth/user", root.pk, account(root, first_name="Ada")).status_code == 302
    assert User.objects.get().first_name == "Ada"


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


def test_nobody_raises_the_role_they_hold(clerk, clerks):
    page = save(clerk, "accounts/membership", clerks.pk, role(clerks, Role.ADMIN))
    assert "You cannot raise your own role" in page.content.decode()
    assert Membership.objects.get().role == Role.VIEWER


def test_nor_on_the_page_of_the_team(clerk, clerks, team):
    row = {"id": clerks.pk, "team": team.pk, "user": clerk.pk, "role": "admin"}
    sent = {"name": team.name, "memberships-TOTAL_FORMS": 1, "memberships-INITIAL_FORMS": 1}
    sent |= {f"memberships-0-{name}": value for name, value in row.items()}
    page = save(clerk, "accounts/team", team.pk, sent)
    assert "You cannot raise your own role" in page.content.decode()
    assert Membership.objects.get().role == Role.VIEWER


def test_nor_a_superuser(root, team):
    own = Membership.objects.create(user=root, team=team, role=Role.VIEWER)
    save(root, "accounts/membership", own.pk, role(own, Role.ADMIN))
    assert Membership.objects.get().role == Role.VIEWER


def test_a_role_of_ones_own_is_not_taken_to_another_team(clerk, clerks, other_team):
    Membership.objects.filter(pk=clerks.pk).update(role=Role.ADMIN)
    sent = {**role(clerks, Role.ADMIN), "team": other_team.pk}
    save(clerk, "accounts/membership", clerks.pk, sent)
    assert not Membership.objects.filter(user=clerk, team=other_team).exists()


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
