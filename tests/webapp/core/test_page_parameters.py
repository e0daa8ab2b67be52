"""Query parameters of pages: one that a page does not read is refused by its name."""

import html

import pytest

from tests.webapp.conftest import client_of
from webapp.accounts.models import Membership, Role
from webapp.hosts.models import Host
from webapp.plans.models import Plan

pytestmark = pytest.mark.django_db(databases="__all__")


def test_a_page_names_the_parameter_that_it_does_not_read(olga, things):
    Membership.objects.filter(user=olga).update(role=Role.ADMIN)
    page, pool = f"/jobs/{things['<job_id>']}/", f"/queue/{things['<slug:pool_id>']}/"
    plan = f"/plans/{things['<plan_id>']}/"
    cases = {
        "/jobs/": {"page": ["abc", "0", "-1", "1.5", "٣", "9" * 400], "since": ["1"], "stat": ["x"]},
        "/plans/": {"page": ["abc", "0"], "filter": ["x"]},
        plan: {"question": [], "tab": ["x"]},
        "/audit/": {"page": ["x"], "since": ["abc"], "from": ["never", "20261128"], "to": ["2026-13-45"]},
        "/audit/export/": {"page": ["2"], "from": ["x"]},
        "/queue/": {"offset": ["-1", "x", "٣", "1.5"], "hosts": ["some"], "page": ["2"]},
        pool: {"offset": ["x"], "jobs": ["x"]},
        "/limits/": {"question": ["nosuch"], "modle": ["x"]},
        "/compare/": {"jobs": ["x"]},
        "/models/": {"page": ["x"]}, "/techniques/": {"page": ["2"]}, "/search/": {"query": ["x"]},
        "/settings/tokens/": {"page": ["2"]},
        "/plans/new/": {"preset": ["nosuch"], "goal": ["serve"]},
        f"{plan}offers/": {"step": ["nosuch"]},
        page: {"since": ["abc", "-1"], "host": ["0"]},
        f"{page}metrics/": {"host": ["1", "x"], "since": ["x"]},
        f"{page}logs/": {"host": ["1", "-1"], "query": ["x"]},
        f"{page}logs/download/": {"host": ["7"]},
    }  # fmt: skip
    client, wrong = client_of(olga), []
    for address, refused in cases.items():
        for name, values in refused.items():
            for value in values:
                answer = client.get(address, {name: value})
                text = html.unescape(answer.content.decode())
                is_named = f"“{name}”" in text or "rank" in text
                if answer.status_code != 400 or not is_named:
                    wrong.append((address, name, value[:20], answer.status_code))
        assert client.get(address, follow=True).status_code == 200, address
    assert not wrong, wrong
    twice = client.get("/jobs/?state=failed&state=running")
    assert (twice.status_code, "stands 2 times" in twice.content.decode()) == (400, True)
    assert "Did you mean state?" in client.get("/jobs/?stat=x").content.decode()


def test_a_link_to_a_demo_on_a_host_plans_for_that_host(alice, host, other_host):
    for each in (host, other_host):
        client_of(alice).get(f"/plans/new/?preset=demo&host={each.pk}")
        plan = Plan.objects.filter(owner=alice).latest("created_at")
        assert plan.draft["hardware"]["host"] == each.pk, each.name
    foreign = client_of(alice).get("/plans/new/?preset=demo&host=01ARZ3NDEKTSV4RRFFQ69G5FAV")
    assert foreign.status_code == 404
    assert Host.objects.count() == 2
