"""A ticket names only what its holder may see."""

import pytest
from django.contrib.auth.models import AnonymousUser

from webapp.live.publish import read_ticket, ticket_for
from webapp.plans.models import Plan

pytestmark = pytest.mark.django_db(databases="__all__")


def topics(user, *wanted: str) -> tuple[str, ...]:
    return read_ticket(ticket_for(user, wanted))[1]


def test_a_member_may_follow_the_teams_jobs_and_hosts(bob, vera, draft, host):
    wanted = (f"host:{host.pk}", f"job:{draft.pk}")
    assert topics(bob, *wanted) == topics(vera, *wanted) == wanted


def test_another_team_may_follow_neither(charlie, draft, host):
    assert topics(charlie, f"job:{draft.pk}", f"host:{host.pk}") == ()


def test_plans_can_be_followed_too(alice, charlie, team):
    plan = Plan.objects.create(team=team, owner=alice)
    assert topics(alice, f"plan:{plan.pk}") == (f"plan:{plan.pk}",)
    assert topics(charlie, f"plan:{plan.pk}") == ()


def test_lists_are_those_of_the_own_team(alice, charlie, team, other_team):
    assert topics(alice, "jobs", "hosts") == (f"hosts:{team.pk}", f"jobs:{team.pk}")
    assert topics(charlie, "jobs") == (f"jobs:{other_team.pk}",)


def test_another_teams_list_cannot_be_named(charlie, team):
    assert topics(charlie, f"jobs:{team.pk}") == ()


@pytest.mark.parametrize("topic", ["", "revoke:1", "user:1", "job:", "job:nope", "*"])
def test_what_is_no_topic_is_left_out(alice, topic):
    assert topics(alice, topic) == ()


def test_nobody_may_follow_anything(draft):
    assert topics(AnonymousUser(), "jobs", f"job:{draft.pk}") == ()
