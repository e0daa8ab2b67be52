"""Two people on one row of the administration: the later form is refused, with who and when."""

import pytest
from django.contrib import admin
from django.urls import reverse

from tests.webapp.conftest import client_of
from webapp.accounts.models import Membership, Quota, Role, Team
from webapp.core.admin_base import FreshAdmin, ReadOnlyAdmin
from webapp.hosts.models import Pool

pytestmark = pytest.mark.django_db(databases="__all__")
OURS = [
    each for each in admin.site._registry.values() if type(each).__module__.startswith("webapp")
]


@pytest.fixture
def root(admin_user):
    return client_of(admin_user)


@pytest.fixture
def ruth(django_user_model):
    """A second administrator."""
    return client_of(django_user_model.objects.create_superuser("ruth"))


def form_of(client, row) -> tuple[str, dict[str, str]]:
    """Return the address of a row's form and the fields that it shows."""
    options = row._meta
    path = reverse(f"admin:{options.app_label}_{options.model_name}_change", args=[row.pk])
    page = client.get(path)
    shown = page.context["adminform"].form
    fields = {name: shown[name].value() for name in shown.fields}
    fields |= {"seen": page.context["seen"]}
    for formset in page.context["inline_admin_formsets"]:
        fields |= {
            f"{formset.formset.prefix}-{name}": 0 for name in ("TOTAL_FORMS", "INITIAL_FORMS")
        }
    return path, {name: "" if value is None else value for name, value in fields.items()}


def test_the_later_of_two_forms_is_refused_and_says_by_whom(root, ruth, team):
    path, fields = form_of(root, team)
    assert ruth.post(path, fields | {"name": "By Ruth"}).status_code == 302

    answer = root.post(path, fields | {"name": "By root"})

    assert "changed by ruth on" in answer.content.decode()
    assert Team.objects.get(pk=team.pk).name == "By Ruth"


def test_the_form_that_shows_the_change_is_saved(root, ruth, team):
    path, fields = form_of(root, team)
    ruth.post(path, fields | {"name": "By Ruth"})
    path, fields = form_of(root, team)

    assert root.post(path, fields | {"name": "By root"}).status_code == 302
    assert Team.objects.get(pk=team.pk).name == "By root"


def test_a_change_by_the_site_itself_counts(root, team):
    row = Quota.objects.create(team=team, max_devices=2)
    path, fields = form_of(root, row)
    Quota.objects.filter(pk=row.pk).update(max_devices=3)

    answer = root.post(path, fields | {"max_devices": 4})

    assert "changed by somebody" in answer.content.decode()
    assert Quota.objects.get().max_devices == 3


def test_a_member_who_came_meanwhile_counts(root, team, alice):
    path, fields = form_of(root, team)
    Membership.objects.filter(user=alice).update(role=Role.VIEWER)

    assert "It was changed" in root.post(path, fields).content.decode()


def test_teams_that_share_a_pool_count(root, team, other_team):
    pool = Pool.objects.create(name="Shared", slug="shared", team=team)
    path, fields = form_of(root, pool)
    pool.shared_with.add(other_team)

    assert "It was changed" in root.post(path, fields).content.decode()


def test_logging_in_meanwhile_is_no_change(root, bob):
    path, fields = form_of(root, bob)
    client_of(bob)

    answer = root.post(path, fields)

    assert "It was changed" not in answer.content.decode()


def test_whoever_can_change_a_row_is_asked_for_what_they_saw(rf, admin_user):
    request = rf.get("/")
    request.user = admin_user
    changing = [each for each in OURS if each.has_change_permission(request)]

    assert changing
    assert [type(one) for one in changing if not isinstance(one, FreshAdmin | ReadOnlyAdmin)] == []
