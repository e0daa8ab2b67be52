"""A host's named environments: what it says of them, what operators order, when orders end."""

import pytest

from runners.messages import EnvironmentState
from tests.webapp.conftest import client_of, make_beat
from webapp.core.problems import InvalidProblem, NotFoundProblem
from webapp.hosts.environments import environment_order, environments_of
from webapp.hosts.heartbeats import host_beat
from webapp.jobs.models import Event

pytestmark = pytest.mark.django_db(databases="__all__")

MAIN = EnvironmentState(name="main", stage="ready")


def tiny(**changes) -> EnvironmentState:
    said = {"name": "tiny", "stage": "absent", "purpose": "For tests.", "size_bytes": 5_000_000}
    return EnvironmentState(**{**said, **changes})


def heard(host, *said):
    """Beat with these environments and return the reply."""
    reply = host_beat(host=host, beat=make_beat(environments=said or None))
    host.refresh_from_db()
    return reply


@pytest.fixture
def telling(host):
    """A host that said what environments it knows."""
    heard(host, MAIN, tiny())
    return host


def order(host, action="build", name="tiny"):
    environment_order(host=host, name=name, action=action, by="olga")


def press(user, host, action, name="tiny") -> str:
    url = f"/hosts/{host.slug}/environments/{name}/{action}/"
    return client_of(user).post(url, follow=True).content.decode()


def test_what_another_version_wrote_down_is_passed_over(telling):
    telling.checks["environments"][1] = {"name": "<b>", "since": 1}
    telling.save()

    assert [row.state.name for row in environments_of(telling)] == ["main"]


def test_what_a_host_says_stays_until_it_says_something_else(telling):
    heard(telling)

    assert [row.state.name for row in environments_of(telling)] == ["main", "tiny"]
    assert "environments" not in telling.last_beat


def test_an_order_is_asked_with_each_beat_until_the_host_carried_it_out(telling):
    order(telling)

    (first,), (again,) = heard(telling).environments, heard(telling).environments
    building = heard(telling, MAIN, tiny(stage="building", done=1, total=6)).environments
    after = heard(telling, MAIN, tiny(stage="ready", order_id=first.order_id)).environments

    assert (first.name, first.action) == ("tiny", "build")
    assert again == first == building[0]
    assert after == ()


def test_an_order_that_failed_is_not_asked_again(telling):
    order(telling)
    order_id = heard(telling).environments[0].order_id

    reply = heard(telling, MAIN, tiny(stage="failed", words="no index", order_id=order_id))

    assert reply.environments == ()


def test_a_later_order_replaces_an_earlier_one(telling):
    order(telling, "build")
    order(telling, "remove")

    assert [each.action for each in heard(telling).environments] == ["remove"]


def test_an_order_for_what_a_host_knows_no_more_is_dropped(telling):
    order(telling)

    assert heard(telling, MAIN).environments == ()


def test_the_agents_own_environment_and_unknown_ones_are_refused_by_name(telling):
    with pytest.raises(InvalidProblem, match="The environment main stays"):
        order(telling, "remove", "main")
    with pytest.raises(NotFoundProblem, match="knows no environment nobody"):
        order(telling, "build", "nobody")


def test_an_operator_builds_from_the_page_and_the_event_stays(telling, olga):
    page = press(olga, telling, "build")

    assert "builds tiny after its next heartbeat" in page
    assert "Waits for the host to build it." in page
    assert "Environment tiny: build asked for" in page
    assert Event.objects.get(kind="host.environment_build").actor == "olga"


def test_a_build_shows_how_far_it_is(telling, alice):
    heard(telling, MAIN, tiny(stage="building", words="Fetching torch", done=2, total=8))

    page = client_of(alice).get(f"/hosts/{telling.slug}/").content.decode()

    assert "Fetching torch, step 2 of 8." in page
    assert 'rect width="25' in page


def test_only_operators_get_buttons_and_a_built_one_is_removed(telling, alice, olga):
    heard(telling, MAIN, tiny(stage="ready", size_bytes=122_000_000, num_packages=14))

    seen = client_of(alice).get(f"/hosts/{telling.slug}/").content.decode()
    page = press(olga, telling, "remove")

    assert "14 packages" in seen
    assert "environments/tiny/remove" not in seen
    assert "removes tiny after its next heartbeat" in page
