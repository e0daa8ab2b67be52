"""The review page asks for a plan's question and its job once."""

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from tests.webapp.conftest import client_of
from tests.webapp.plans.conftest import with_model
from webapp.jobs import launching
from webapp.plans import planning
from webapp.plans.planning import plan_compute

pytestmark = pytest.mark.django_db(databases="__all__")
# Session, user with memberships and teams, plan, model with its host, the job that wrote the
# model, its adapters, quota with the queued jobs, secrets: each row or list is read once.
MOST_QUERIES = 8


def counted(monkeypatch, module, name: str) -> list:
    calls, real = [], getattr(module, name)

    def call(*given, **more):
        calls.append(name)
        return real(*given, **more)

    monkeypatch.setattr(module, name, call)
    return calls


def test_the_review_of_a_serve_plan_asks_its_question_once(
    serve_plan, trained, alice, monkeypatch
):
    plan, client = with_model(serve_plan, trained, "serve"), client_of(alice)
    plan_compute(plan)
    asked = counted(monkeypatch, launching, "question_of")
    planned = counted(monkeypatch, planning, "compute")
    with CaptureQueriesContext(connection) as seen:
        page = client.get(f"/plans/{plan.pk}/edit/review/")
    assert page.status_code == 200
    assert len(seen) <= MOST_QUERIES
    assert (len(asked), len(planned)) == (1, 0)
