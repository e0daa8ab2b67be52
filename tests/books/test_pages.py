"""The text of every kind of page, in the states that its area knows, is the stored one.

A state's path names fixtures: ``/jobs/{running.pk}/`` is the page of the fixture ``running``. The
clock stands still and ids are counted, so that a page has the same text in every run.
"""

import datetime as dt
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import time_machine
from django.conf import settings as django_settings
from django.http import HttpResponse
from django.test import Client

from tests.books.book import Book, line_differences
from tests.books.normalising import with_placeholders
from tests.books.states import PASSWORD
from tests.books.visible_text import visible_text
from tests.webapp.conftest import client_of
from webapp.core import ids
from webapp.plans.planning import plan_compute

pytestmark = pytest.mark.django_db(databases="__all__")
BOOK = Book("pages", ".txt", line_differences)
NOW = dt.datetime(2023, 11, 14, 22, 13, 20, tzinfo=dt.UTC)  # of the first event of ``batch_of``
VARYING = (
    (re.compile(r"slt_[\w-]{43}"), "TOKEN"),
    (re.compile(r"((?:compared|computed|searches|answered)\b.* in )[\d.]+ m?s\b"), r"\1TIME"),
)
TOP_BAR = re.compile(r'<a class="skip".*?</header>', re.DOTALL)  # shown of home pages alone
Fixture = Callable[[str], Any]


class Page(NamedTuple):
    """A page in one state: what makes its path, who looks, and what is sent if anything."""

    path: str | Callable[[Fixture], str]
    user: str = "alice"
    with_fixtures: tuple[str, ...] = ()
    posted: dict[str, Any] | None = None
    status: int = 200


class Named(Mapping[str, Any]):
    """Fixtures by name, for the placeholders of a path."""

    def __init__(self, fixture: Fixture) -> None:
        self._fixture = fixture

    def __getitem__(self, name: str) -> Any:
        return self._fixture(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def plan(goal: str, source: str, tab: str = "", **pins: Any) -> Callable[[Fixture], str]:
    """Return the maker of a path: of a computed plan with a goal, a model and pins."""

    def make(fixture: Fixture) -> str:
        made = fixture("plan_of")(goal, source)
        made.draft["pins"] |= pins
        made.save()
        plan_compute(made)
        return f"/plans/{made.pk}/{tab}"

    return make


def job(kind: str, tab: str = "") -> Callable[[Fixture], str]:
    """Return the maker of a path: of a job of a kind."""
    return lambda fixture: f"/jobs/{fixture('of_kind')(kind).pk}/{tab}"


def ended(state: str, reason: str) -> Callable[[Fixture], str]:
    """Return the maker of a path: of a training that ended so."""
    return lambda fixture: f"/jobs/{fixture('ended_as')(state, reason).pk}/"


STEP = "/plans/{demo_plan.pk}/edit"
ASKED = "question=most_users&ask=1&hardware=rtx-4090"
PAGES: dict[str, Page] = {
    # Accounts
    "login": Page("/login/", ""),
    "login-wrong-password": Page("/login/", "", posted={"username": "alice", "password": "no"}),
    "password-forgotten": Page("/password/forgotten/", ""),
    "password-change": Page("/settings/password/"),
    "secrets-empty": Page("/settings/secrets/", "olga"),
    "secrets": Page("/settings/secrets/", "olga", ("secret",)),
    "sessions": Page("/settings/sessions/"),
    # Home
    "home-new": Page("/"),
    "home-running": Page("/", with_fixtures=("running",)),
    "home-failed-and-silent": Page("/", with_fixtures=("failed", "silent")),
    "home-viewer": Page("/", "vera", ("finished",)),
    "search": Page("/search/?q=demo", with_fixtures=("running",)),
    # Plans and the wizard
    "plans-empty": Page("/plans/"),
    "plans": Page("/plans/", with_fixtures=("demo_plan", "starved")),
    "wizard-goal": Page(f"{STEP}/goal/"),
    "wizard-model": Page(f"{STEP}/model/"),
    "wizard-workload-pretrain": Page(f"{STEP}/workload/"),
    "wizard-hardware": Page(f"{STEP}/hardware/"),
    "wizard-review": Page(f"{STEP}/review/"),
    "wizard-review-serve": Page(
        lambda fixture: f"/plans/{fixture('plan_of')('serve', 'team').pk}/edit/review/"
    ),
    **{
        f"wizard-workload-{goal}": Page(
            lambda fixture, goal=goal: (
                f"/plans/{fixture('plan_of')(goal, 'catalog').pk}/edit/workload/"
            )
        )
        for goal in ("serve", "generate", "finetune", "compress")
    },
    "wizard-refused": Page(
        f"{STEP}/hardware/", posted={"choice": "host:none", "go": "next"}, status=422
    ),
    "plan-serve": Page(plan("serve", "catalog")),
    "plan-serve-alternatives": Page(plan("serve", "catalog", "alternatives/")),
    "plan-serve-why": Page(plan("serve", "catalog", "why/")),
    "plan-serve-limits": Page(plan("serve", "catalog", "limits/")),
    "plan-serve-exports": Page(plan("serve", "catalog", "exports/")),
    "plan-history": Page("/plans/{starved.plan.pk}/history/"),
    "plan-generate": Page(plan("generate", "folder")),
    "plan-finetune": Page(plan("finetune", "team")),
    "plan-pretrain": Page(plan("pretrain", "demo")),
    "plan-compress": Page(plan("compress", "team")),
    "plan-not-launched-here": Page(plan("finetune", "catalog")),
    # Jobs
    "jobs-empty": Page("/jobs/"),
    "jobs": Page("/jobs/", with_fixtures=("running", "queued")),
    "job-draft": Page("/jobs/{draft.pk}/"),
    "job-queued": Page("/jobs/{queued.pk}/"),
    "job-preflight": Page("/jobs/{job.pk}/"),
    "job-starting": Page("/jobs/{attempt.job.pk}/"),
    "job-running": Page("/jobs/{running.pk}/"),
    "job-stopping": Page("/jobs/{stopping.pk}/"),
    "job-succeeded": Page("/jobs/{finished.pk}/"),
    "job-failed": Page("/jobs/{failed.pk}/"),
    "job-stopped": Page("/jobs/{stopped.pk}/"),
    "job-error": Page(ended("error", "host_rebooted")),
    "job-expired": Page(ended("expired", "max_duration")),
    "job-two-hosts": Page("/jobs/{gang.pk}/"),
    "job-metrics": Page("/jobs/{finished.pk}/metrics/"),
    "job-logs": Page("/jobs/{running.pk}/logs/"),
    "job-events": Page("/jobs/{finished.pk}/events/"),
    "job-config": Page("/jobs/{finished.pk}/config/"),
    "job-artefacts": Page("/jobs/{finished.pk}/artefacts/"),
    "job-post-mortem": Page("/jobs/{starved.pk}/post-mortem/"),
    "job-compress": Page(job("compress")),
    "job-evaluate": Page(job("evaluate")),
    "job-benchmark": Page(job("benchmark")),
    "job-generate": Page(job("generate")),
    "job-serve": Page(job("serve")),
    "compare": Page("/compare/?job={slow.pk}&job={fast.pk}"),
    # Hosts and the queue
    "hosts-empty": Page("/hosts/"),
    "hosts": Page("/hosts/", with_fixtures=("measured", "rack", "other_host")),
    "host": Page("/hosts/{measured.slug}/"),
    "host-operator": Page("/hosts/{host.slug}/", "olga", ("running",)),
    "host-silent": Page("/hosts/{silent.slug}/"),
    "host-planned": Page("/hosts/{rack.slug}/", "olga"),
    "host-gpus": Page("/hosts/{node_a.slug}/", "olga"),
    "host-add": Page("/hosts/add/", "olga"),
    "host-add-waiting": Page("/hosts/add/{token}/", "olga"),
    "host-virtual-new": Page("/hosts/virtual/new/", "olga"),
    "queue-empty": Page("/queue/"),
    "queue": Page("/queue/", with_fixtures=("queued",)),
    "queue-operator": Page("/queue/", "olga", ("queued",)),
    "queue-limits": Page("/queue/limits/", "olga"),
    # Models, techniques, data, limits, documentation
    "models": Page("/models/", with_fixtures=("trained",)),
    "model-new": Page("/models/new/"),
    "model-catalog": Page("/models/meta-llama/Llama-3.1-8B/", with_fixtures=("host",)),
    "model-team": Page("/models/{trained.pk}/"),
    "techniques": Page("/techniques/"),
    "technique": Page("/techniques/gptq/"),
    "data-empty": Page("/data/"),
    "data": Page("/data/", with_fixtures=("dataset",)),
    "limits": Page("/limits/"),
    "limits-answered": Page(f"/limits/?{ASKED}"),
    "docs-index": Page("/docs/"),
    # Operators, administration, errors
    "audit": Page("/audit/", "ada", ("running",)),
    "admin-login": Page("/admin/login/", ""),
    "admin": Page("/admin/", "root"),
    "admin-teams": Page("/admin/accounts/team/", "root", ("team",)),
    "error-not-found": Page("/jobs/01J00000000000000000000000/", status=404),
    "error-forbidden": Page("/hosts/add/", "vera", status=403),
    "error-other-team": Page("/jobs/{running.pk}/", "charlie", status=404),
}


@pytest.fixture(autouse=True)
def _still(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop the clock, and count ids."""
    numbers = itertools.count(1)
    monkeypatch.setattr(ids, "ULID", lambda: f"01J{next(numbers):023}")
    with time_machine.travel(NOW, tick=False):
        yield


def shown(page: Page, fixture: Fixture) -> HttpResponse:
    """Return the response to a person who opens the page in its state."""
    for name in page.with_fixtures:
        fixture(name)
    make = page.path
    path = make(fixture) if callable(make) else make.format_map(Named(fixture))
    client = client_of(fixture(page.user)) if page.user else Client()
    return client.get(path) if page.posted is None else client.post(path, page.posted)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_the_stored_text(
    name: str, request: pytest.FixtureRequest, is_rewriting: bool
) -> None:
    response = shown(PAGES[name], request.getfixturevalue)

    assert response.status_code == PAGES[name].status, response.headers.get("Location")
    html = response.content.decode()
    text = visible_text(html if name.startswith("home-") else TOP_BAR.sub("", html))
    text = with_placeholders(text, {str(django_settings.DATA_DIR): "DATA", PASSWORD: "PASSWORD"})
    for pattern, placeholder in VARYING:
        text = pattern.sub(placeholder, text)
    BOOK.compare(name, text, is_rewriting=is_rewriting)


def test_every_stored_page_has_a_state(is_rewriting: bool) -> None:
    BOOK.compare_entries(PAGES, is_rewriting=is_rewriting)
